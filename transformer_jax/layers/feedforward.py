"""The position-wise feed-forward layer."""

from __future__ import annotations

import flax.linen as nn
import jax

from transformer_jax.config import ModelConfig
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.linear import Linear
from transformer_jax.sharding.activations import constrain

ACTIVATIONS = {
    'relu': jax.nn.relu,
    'gelu': lambda x: jax.nn.gelu(x, approximate=False),
    'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
    'silu': jax.nn.silu,
}


class FeedForward(nn.Module):
    """y = act(x W_up + b) W_down + b (Vaswani et al. 2017, section 3.3).

    Gated: y = (act(x W_gate) * (x W_up)) W_down (Shazeer 2020).
    gelu is x Phi(x), gelu_tanh its tanh form (Hendrycks and Gimpel 2016).

    Attributes:
      gain: of the initial projections (DeepNorm's beta).
      width: F (None: that of the config).
    """

    config: ModelConfig
    gain: float = 1.0
    width: int | None = None

    @nn.compact
    def __call__(self, x_BTD: jax.Array, deterministic: bool) -> jax.Array:
        config = self.config
        D, F = config.d_model, self.width or config.d_ff

        def linear(name, shape, axes):
            return Linear(config, shape, axes, use_bias=config.ffn_bias, gain=self.gain, name=name)

        hidden = linear('up', (D, F), ('embed', 'mlp'))(x_BTD)
        activation = ACTIVATIONS[config.ffn.removeprefix('gated_')]
        if config.ffn.startswith('gated_'):
            hidden = activation(linear('gate', (D, F), ('embed', 'mlp'))(x_BTD)) * hidden
        else:
            hidden = activation(hidden)
        hidden = Dropout(config.ffn_dropout)(constrain(hidden, 'batch', 'length', 'mlp'), deterministic)
        return linear('down', (F, D), ('mlp', 'embed'))(hidden)
