"""From images to the tokens of a vision encoder."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.layers.embedding import Table
from transformer_jax.layers.linear import Linear


class Patches(nn.Module):
    """x = [class token; patch_1 W + b; ...], patches row by row from the top left (Dosovitskiy et al. 2021, eq. 1).

    W has the axes of a patch, (height, width, channels, D): the convolution whose stride is its size.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns (B, tokens, D) of images (B, height, width, channels)."""
        config, patches = self.config, self.config.patches
        B, height, width, channels = images.shape
        p, q = patches.patch_size
        rows, columns = height // p, width // q
        cut = jnp.swapaxes(images.reshape(B, rows, p, columns, q, channels), 2, 3)
        shape, axes = (p, q, channels, config.d_model), (None, None, None, 'embed')
        x = Linear(config, shape, axes, inputs=3, use_bias=True, name='projection')(cut)
        x = x.reshape(B, rows * columns, config.d_model)
        if not patches.class_token:
            return x
        first = Table(config, 1, 'types', name='class_token')(jnp.zeros((B, 1), jnp.int32))
        return jnp.concatenate([first.astype(x.dtype), x], axis=1)
