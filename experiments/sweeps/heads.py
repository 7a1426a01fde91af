"""Head count at equal parameters: h heads of width D / h (Vaswani et al. 2017, table 3, rows A)."""

from transformer_jax.sweeps import Sweep, axis


def get_sweep():
    return Sweep(
        name='heads',
        title='Number of attention heads at equal parameters',
        points=axis('model.num_heads', (1, 2, 4, 8, 16)),
        baseline='num_heads=4',
    )
