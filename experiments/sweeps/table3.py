"""Rows of table 3 of Vaswani et al. 2017, at the size of the base config: A, B, C, D and E."""

from transformer_jax.sweeps import Sweep, axis, chain, product, variants, zip_equal


def get_sweep():
    heads = zip_equal(
        axis('model.num_heads', (1, 2, 8, 16)), axis('model.d_k', (64, 32, 8, 4)), axis('model.d_v', (64, 32, 8, 4))
    )
    return Sweep(
        name='table3',
        title='Table 3 of "Attention Is All You Need", scaled down',
        points=chain(
            variants({'base': {}}),
            heads,
            product(axis('model.d_k', (4, 8)), axis('model.d_v', (16,))),
            axis('model.num_layers', (1, 3)),
            axis('model.d_ff', (128, 512)),
            axis('model.dropout', (0.1, 0.2)),
            axis('training.label_smoothing', (0.0, 0.2)),
            variants({'position=learned': {'model.position': 'learned', 'model.max_positions': 128}}),
        ),
        baseline='base',
    )
