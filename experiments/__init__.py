"""Programs: python -m experiments.{train, evaluate, generate}; everything they do is in transformer_jax."""
