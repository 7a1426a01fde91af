"""One residual formula which gives every norm placement."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax

from transformer_jax.config import ModelConfig
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.norm import Norm
from transformer_jax.sharding.activations import constrain


class Residual(nn.Module):
    """y = out_norm(alpha x + dropout(branch_norm(f(in_norm(x))))), where f is a sublayer.

    | placement          | in_norm     | branch_norm | out_norm | alpha    | used by                              |
    |--------------------|-------------|-------------|----------|----------|--------------------------------------|
    | post               |             |             | x        | 1        | Vaswani et al. 2017, section 3.1     |
    | pre                | x           |             |          | 1        | GPT-2; Xiong et al. 2020             |
    | sandwich           | x           | x           |          | 1        | Gemma 2                              |
    | res_post           |             | x           |          | 1        | Swin v2, OLMo 2                      |
    | deepnorm           |             |             | x        | by depth | Wang et al. 2022, `deepnorm` below   |
    | parallel           | x, shared   |             |          | 1        | GPT-J: one sum of both branches      |
    | parallel_two_norms | x           |             |          | 1        | GPT-NeoX                             |

    f stands between the two methods: `residual.leave(x, f(residual.enter(x)))`.

    Attributes:
      in_norm: False for the branch which shares another's norm, or which needs none.
    """

    config: ModelConfig
    alpha: float = 1.0
    in_norm: bool = True

    def setup(self):
        position = self.config.norm_position
        if self.in_norm and position in ('pre', 'sandwich', 'parallel', 'parallel_two_norms'):
            self.before = Norm(self.config, name='in_norm')
        if position in ('sandwich', 'res_post'):
            self.branch = Norm(self.config, name='branch_norm')
        if position in ('post', 'deepnorm'):
            self.after = Norm(self.config, name='out_norm')
        self.dropout = Dropout(self.config.dropout)

    def enter(self, x: jax.Array) -> jax.Array:
        """Returns in_norm(x), the input of the sublayer."""
        position = self.config.norm_position
        has_norm = self.in_norm and position in ('pre', 'sandwich', 'parallel', 'parallel_two_norms')
        return self.before(x) if has_norm else x

    def leave(self, x: jax.Array, branch: jax.Array, deterministic: bool) -> jax.Array:
        """Returns out_norm(alpha x + dropout(branch_norm(branch)))."""
        position = self.config.norm_position
        if position in ('sandwich', 'res_post'):
            branch = self.branch(branch)
        y = self.alpha * x + self.dropout(constrain(branch, 'batch', 'length', None), deterministic)
        return self.after(y) if position in ('post', 'deepnorm') else y


class DeepNorm(NamedTuple):
    """alpha scales the residual stream; beta is the Xavier gain of FFN, value and output projections."""

    alpha: float
    beta: float


def deepnorm(config: ModelConfig, stack: str) -> DeepNorm:
    """Returns the constants of a stack, (1, 1) for every other placement (Wang et al. 2022, figure 2).

    One stack of N layers: alpha = (2N)^(1/4), beta = (8N)^(-1/4). N encoder with M decoder layers: encoder
    alpha = 0.81 (N^4 M)^(1/16), beta = 0.87 (N^4 M)^(-1/16); decoder alpha = (3M)^(1/4), beta = (12M)^(-1/4).
    """
    if config.norm_position != 'deepnorm':
        return DeepNorm(1.0, 1.0)
    N, M = config.depth('encoder'), config.depth('decoder')
    if config.kind != 'encoder_decoder':
        return DeepNorm((2 * N) ** 0.25, (8 * N) ** -0.25)
    if stack == 'encoder':
        return DeepNorm(0.81 * (N**4 * M) ** (1 / 16), 0.87 * (N**4 * M) ** (-1 / 16))
    return DeepNorm((3 * M) ** 0.25, (12 * M) ** -0.25)
