"""How order enters the model: sinusoids, learned vectors, rotation, biases, or not at all."""

from transformer_jax.sweeps import Sweep, axis, chain, variants


def get_sweep():
    return Sweep(
        name='positions',
        title='Position encodings',
        points=chain(
            axis('model.position', ('sinusoidal', 'rope', 'alibi', 'relative', 'none')),
            # Learned positions need the number of rows of their table: the longest sequence of the data.
            variants({'position=learned': {'model.position': 'learned', 'model.max_positions': 128}}),
        ),
        baseline='position=sinusoidal',
    )
