"""What stands between the last hidden state and the logits of a BERT-like model, and on a pooled sequence."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.feedforward import ACTIVATIONS
from transformer_jax.layers.linear import Linear
from transformer_jax.layers.norm import Norm


def pool(x_BTD: jax.Array, real_BT: jax.Array | None, pooling: str) -> jax.Array:
    """Returns one vector per sequence, BD: of its 'first' real token, or the 'mean' of its real tokens in fp32.

    A sequence without a real token gives its first slot, or zeros.

    Args:
      real_BT: which tokens are real (None: all).
    """
    real = jnp.ones(x_BTD.shape[:2], bool) if real_BT is None else jnp.asarray(real_BT).astype(bool)
    if pooling == 'first':
        return jnp.take_along_axis(x_BTD, jnp.argmax(real, axis=1)[:, None, None], axis=1)[:, 0]
    total = jnp.where(real[..., None], x_BTD, 0).sum(axis=1, dtype=jnp.float32)
    return (total / jnp.maximum(real.sum(axis=1, keepdims=True), 1)).astype(x_BTD.dtype)


class HeadLayer(nn.Module):
    """y = norm(act(x W + b)), norm and bias by choice.

    On every token before BERT's and ModernBERT's masked-LM logits (gelu, norm); on the pooled first token BERT's pooler
    (tanh, no norm). Devlin et al. 2019, section 3.1 and released code; Warner et al. 2024.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        shape, axes = (config.d_model, config.d_model), ('embed', 'mlp')
        y = Linear(config, shape, axes, use_bias=config.head_bias, name='dense')(x)
        y = jnp.tanh(y) if config.head_activation == 'tanh' else ACTIVATIONS[config.head_activation](y)
        return Norm(config, name='norm')(y) if config.head_norm else y


class Classifier(nn.Module):
    """logits = dropout(x) W + b over classes, BC in fp32, of a pooled sequence BD (Devlin et al. 2019, section 4.1)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, pooled_BD: jax.Array, deterministic: bool) -> jax.Array:
        config = self.config
        shape, axes = (config.d_model, config.num_classes), ('embed', 'classes')
        pooled_BD = Dropout(config.dropout)(pooled_BD, deterministic)
        return Linear(config, shape, axes, use_bias=True, name='output')(pooled_BD).astype(jnp.float32)
