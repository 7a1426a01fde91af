"""Where the norms stand in the residual formula, all else equal."""

from transformer_jax.sweeps import Sweep, axis


def get_sweep():
    return Sweep(
        name='norm_placement',
        title='Norm placement',
        points=axis('model.norm_position', ('post', 'pre', 'sandwich', 'res_post', 'deepnorm')),
        baseline='norm_position=post',
    )
