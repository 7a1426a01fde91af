"""Learning rate against norm placement (Xiong et al. 2020, section 4)."""

from transformer_jax.sweeps import Sweep, axis, product


def get_sweep():
    return Sweep(
        name='rate_placement',
        title='Learning rate and norm placement',
        points=product(
            axis('model.norm_position', ('post', 'pre', 'sandwich', 'res_post', 'deepnorm')),
            axis('optimizer.learning_rate', (1e-3, 3e-3, 1e-2)),
        ),
        baseline='norm_position=post, learning_rate=0.003',
        heat_map=('model.norm_position', 'optimizer.learning_rate'),
    )
