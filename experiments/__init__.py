"""Programs: python -m experiments.NAME; everything they do is in transformer_jax."""
