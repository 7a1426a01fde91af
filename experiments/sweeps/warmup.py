"""Post-norm needs warm-up, pre-norm does not: steps of warm-up against placement (Xiong et al. 2020, section 3)."""

from transformer_jax.sweeps import Sweep, axis, product


def get_sweep():
    return Sweep(
        name='warmup',
        title='Warm-up and norm placement',
        points=product(
            axis('model.norm_position', ('post', 'pre')),
            axis('optimizer.warmup_steps', (0, 100)),
        ),
        baseline='norm_position=post, warmup_steps=100',
        heat_map=('model.norm_position', 'optimizer.warmup_steps'),
    )
