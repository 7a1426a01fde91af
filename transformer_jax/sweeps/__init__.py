"""Ablations: sweeps as data, their runs, and the tables and figures which compare them."""

from transformer_jax.sweeps.language import Point, axis, chain, overlay, product, variants, zip_equal
from transformer_jax.sweeps.plan import Sweep, plan

__all__ = ['Point', 'Sweep', 'axis', 'chain', 'overlay', 'plan', 'product', 'variants', 'zip_equal']
