"""The linear layer: a product over one or several axes, with named parameter axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.ops.products import ColumnMajor, einsum
from transformer_jax.ops.quantized import QuantizedArray

_LETTERS = 'abcdefgh'


def kernel_init(config: ModelConfig, fan_in: int, fan_out: int, gain: float = 1.0):
    """Returns the initialiser of a matrix: Glorot's uniform +- gain sqrt(6 / (fan_in + fan_out)), or a normal."""
    if config.initializer == 'normal':
        return nn.initializers.normal(gain * config.initializer_stddev)
    limit = gain * math.sqrt(6 / (fan_in + fan_out))

    def xavier_uniform(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return xavier_uniform


class Kernel(nn.Module):
    """The matrix of a linear layer by itself, for products which take it apart or have several of them.

    Attributes:
      shape, axes: as in `Linear`; fan_in, fan_out: of one matrix; gain: factor of the initial scale.
    """

    config: ModelConfig
    shape: Sequence[int]
    axes: Sequence[str | None]
    fan_in: int
    fan_out: int
    gain: float = 1.0

    @nn.compact
    def __call__(self) -> jax.Array:
        init = kernel_init(self.config, self.fan_in, self.fan_out, self.gain)
        init = nn.with_logical_partitioning(init, tuple(self.axes))
        kernel = self.param('kernel', init, tuple(self.shape), jnp.dtype(self.config.param_dtype))
        # What takes a matrix apart knows arrays only, so a quantised one is made floats here.
        return kernel.astype(self.config.param_dtype) if isinstance(kernel, QuantizedArray) else kernel


class Linear(nn.Module):
    """y = x W + b over the last axes of x, one for each axis of W which is no output axis.

    Attributes:
      shape: of W, input axes first; axes: their logical names.
      inputs: how many of them are input axes.
      gain: factor of the initial scale.
    """

    config: ModelConfig
    shape: Sequence[int]
    axes: Sequence[str | None]
    inputs: int = 1
    use_bias: bool = False
    gain: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        fan_in, fan_out = math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :])
        # Laid out for steps it has another shape, which Flax would refuse in a parameter.
        kernel = self.get_variable('params', 'kernel')
        if not isinstance(kernel, ColumnMajor):
            init = nn.with_logical_partitioning(kernel_init(config, fan_in, fan_out, self.gain), tuple(self.axes))
            kernel = self.param('kernel', init, tuple(self.shape), jnp.dtype(config.param_dtype))
            # As a product of matrices: XLA on CPU copies a kernel of three axes to transpose it for the backward one.
            kernel = kernel.reshape(fan_in, fan_out)
        leading, output = x.shape[: x.ndim - self.inputs], tuple(self.shape[self.inputs :])
        letters = _LETTERS[: len(leading)]
        spec = f'{letters}y,yz->{letters}z'
        x = x.astype(config.dtype).reshape(*leading, fan_in)
        if not self.use_bias:
            return einsum(spec, x, kernel).reshape(*leading, *output)
        y = einsum(spec, x, kernel, jnp.float32).reshape(*leading, *output)
        init = nn.with_logical_partitioning(nn.initializers.zeros, tuple(self.axes[self.inputs :]))
        bias = self.param('bias', init, output, jnp.dtype(config.param_dtype))
        # Added before the one rounding, so that the bias's gradient too is a sum in fp32, on any backend.
        return (y + bias.astype(jnp.float32)).astype(config.dtype)
