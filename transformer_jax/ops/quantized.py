"""Arrays of small integers with scales, which stand where a matrix stands in the tree of parameters.

The integers, their scales and the product of two integer arrays are qwix's; imported when first used, for it is an
extra. Our own is the product of floats with integers: the scale of a column is laid on the column's sum, so that no
matrix of floats is needed but for the cast, which every backend can fuse (qwix scales the matrix first).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from transformer_jax.errors import UserError


def qwix() -> Any:
    """Returns the module qwix.

    Raises:
      UserError: where it is not installed.
    """
    try:
        import qwix
    except ImportError as error:
        raise UserError("quantisation needs qwix: pip install 'transformer_jax[quantization]'") from error
    return qwix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """w = values * scale, each scale standing for a block of values (along axis i, values.shape[i] / scale.shape[i]).

    `astype` is what makes floats of it, so code which casts its parameters to the compute dtype needs to know nothing.

    Attributes:
      values: int8, or int4, which a device holds two to a byte.
      scale: bfloat16; never zero.
      activations: whether what it is multiplied with is rounded to int8 too, each vector by its own largest number.
      view: shape of the floats, where that is not the shape of the integers.
    """

    values: jax.Array
    scale: jax.Array
    activations: bool = dataclasses.field(metadata={'static': True}, default=False)
    view: tuple[int, ...] | None = dataclasses.field(metadata={'static': True}, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        return self.values.shape if self.view is None else self.view

    @property
    def ndim(self) -> int:
        """Number of its axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Type of the integers."""
        return self.values.dtype

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Returns the floats."""
        scale = jnp.asarray(self.scale).astype(jnp.float32)
        floats = qwix().dequantize(qwix().QArray(jnp.asarray(self.values), scale))
        return floats.astype(dtype).reshape(self.shape)

    def reshape(self, *shape: int) -> QuantizedArray:
        """Returns it with neighbouring axes joined."""
        blocks = _joined(self.values.shape, self.scale.shape, shape)
        if blocks is None:
            return dataclasses.replace(self, view=shape)
        return dataclasses.replace(self, values=self.values.reshape(shape), scale=self.scale.reshape(blocks))

    def take_rows(self, index: jax.Array) -> jax.Array:
        """Returns rows of a matrix as fp32, NaN for an index outside of it."""

        def rows(part, nothing):
            return jnp.asarray(part).at[index].get(mode='fill', fill_value=nothing, wrap_negative_indices=False)

        values, scale = rows(self.values, 0), rows(self.scale, jnp.nan).astype(jnp.float32)
        blocks = values.reshape(*values.shape[:-1], scale.shape[-1], -1).astype(jnp.float32)
        return (blocks * scale[..., None]).reshape(values.shape)

    def contract(self, spec: str, a: jax.Array) -> jax.Array:
        """Returns the einsum of floats `a` with this as its second operand, in fp32; sums are fp32, or int32."""
        terms, out = spec.split('->')
        left, right = terms.split(',')
        # Tied to the activations, or XLA would make floats of all weights once, before a search's loop, and keep them.
        values, a = jax.lax.optimization_barrier((jnp.asarray(self.values), a))
        matrix = dataclasses.replace(self, values=values)
        summed = [axis for axis, letter in enumerate(right) if letter not in out]
        if self.view is not None or any(self.scale.shape[axis] > 1 for axis in summed):
            return jnp.einsum(spec, a, matrix.astype(a.dtype), preferred_element_type=jnp.float32)
        scale = jnp.asarray(self.scale).astype(jnp.float32)
        if self.activations:
            kept = [axis for axis, letter in enumerate(left) if letter in out]
            rounded = qwix().quantize(a.astype(jnp.float32), jnp.int8, channelwise_axes=kept)
            return qwix().einsum(spec, rounded, qwix().QArray(values, scale))
        sums = jnp.einsum(spec, a, values.astype(a.dtype), preferred_element_type=jnp.float32)
        order = sorted(range(self.ndim), key=lambda axis: out.find(right[axis]))
        sizes = dict(zip(right, scale.shape, strict=True))
        return sums * scale.transpose(order).reshape([sizes.get(letter, 1) for letter in out])


def quantize(array: jax.Array, bits: int, blocks: tuple[int, ...], activations: bool = False) -> QuantizedArray:
    """Rounds an array to integers of 8 or 4 bits, each block by its own largest absolute number.

    scale = max|w| / (2^(bits - 1) - 1/2), values = round(w / scale); a block of zeros has the scale 1.

    Args:
      blocks: how many blocks along each axis.
    """
    tiles = {axis: size // count for axis, (size, count) in enumerate(zip(array.shape, blocks, strict=True))}
    found = qwix().quantize(
        jnp.asarray(array, jnp.float32),
        jnp.int8 if bits == 8 else jnp.int4,
        channelwise_axes=[axis for axis, tile in tiles.items() if tile == 1],
        tiled_axes={axis: tile for axis, tile in tiles.items() if tile > 1},
        scale_dtype=jnp.bfloat16,
    )
    return QuantizedArray(found.qvalue, found.scale, activations)


def pack(values: np.ndarray) -> np.ndarray:
    """Returns int4 numbers two to a byte, in their flat order, the first in the lower half; an odd one has 0 beside."""
    flat = np.asarray(values).astype(np.int8).ravel().view(np.uint8) & 15
    flat = np.pad(flat, (0, flat.size % 2))
    return flat[0::2] | flat[1::2] << 4


def unpack(packed: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns what `pack` was given, whose shape was `shape`."""
    halves = np.stack([packed & 15, packed >> 4], axis=-1).ravel()[: math.prod(shape)].astype(np.int8)
    return np.where(halves > 7, halves - 16, halves).astype(jnp.int4).reshape(shape)


def unpack_on_device(packed: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns what `unpack` does, inside a program: a device's int4 lie as `pack` puts them."""
    return jax.lax.bitcast_convert_type(packed, jnp.int4).reshape(-1)[: math.prod(shape)].reshape(shape)


def _joined(old: Sequence[int], blocks: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Blocks along each axis after neighbouring axes are joined; None where those are cut, but not into slices of 1."""
    result, axis = [], 0
    for size in new:
        start = axis
        while math.prod(old[start:axis]) < size:
            axis += 1
        count = math.prod(blocks[start:axis])
        if count not in (1, size) and axis > start + 1:
            return None
        result.append(count)
    return tuple(result)
