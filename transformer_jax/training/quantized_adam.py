"""Adam whose moments are kept in 8 bits, block by block (Dettmers et al. 2021)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Sections 2.1 and 2.2; smaller blocks than the paper's 2048 hold outliers in less.
BLOCK = 256
# Moments of smaller parameters stay in fp32: norms and biases cost nothing and are sensitive.
SMALLEST = 4096


class Moments(NamedTuple):
    """One moment of all parameters.

    Attributes:
      values: int8 codes with the parameter's shape, or the moment itself in fp32 where it is not quantised.
      scales: fp32, the largest magnitude of each block; (0,) where there are none.
    """

    values: Any
    scales: Any


class QuantizedAdamState(NamedTuple):
    """Updates so far and both moments."""

    count: jax.Array
    mu: Moments
    nu: Moments


@functools.cache
def code_values(signed: bool) -> np.ndarray:
    """Returns the 256 values in [-1, 1] or [0, 1] of dynamic tree quantisation, ascending (section 1.3).

    Magnitudes between 10^-(i+1) and 10^-i have 2^(6-i) evenly spaced values (twice as many without a sign), so that
    both large and small ones keep their leading digits; 0 and 1 are among them.
    """
    positive = []
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        positive.append(10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2)
    positive = np.concatenate(positive)
    values = np.concatenate([positive, -positive if signed else [], [0.0, 1.0]])
    return np.sort(values)[:256].astype(np.float32)


def quantize(x: jax.Array, axis: int, signed: bool) -> tuple[jax.Array, jax.Array]:
    """Returns (int8 codes, fp32 scales): each block of at most `BLOCK` values along `axis` divided by its largest."""
    blocks = _blocks(x.astype(jnp.float32), axis)
    scales = jnp.abs(blocks).max(axis + 1, keepdims=True)
    scaled = blocks / jnp.where(scales > 0, scales, 1.0)
    values = code_values(signed)
    codes = jnp.searchsorted(jnp.asarray((values[1:] + values[:-1]) / 2), scaled, method='compare_all') - 128
    whole = codes.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    return jax.lax.slice_in_dim(whole, 0, x.shape[axis], axis=axis).astype(jnp.int8), scales.squeeze(axis + 1)


def dequantize(codes: jax.Array, scales: jax.Array, axis: int, signed: bool) -> jax.Array:
    """Returns fp32 values of what `quantize` gave."""
    values = _blocks(jnp.asarray(code_values(signed))[codes.astype(jnp.int32) + 128], axis)
    whole = (values * jnp.expand_dims(scales, axis + 1)).reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])
    return jax.lax.slice_in_dim(whole, 0, codes.shape[axis], axis=axis)


def _blocks(x: jax.Array, axis: int) -> jax.Array:
    size = min(BLOCK, x.shape[axis])
    padding = [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, padding).reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def scale_by_quantized_adam(b1: float, b2: float, eps: float, axes: Any = None) -> optax.GradientTransformation:
    """Returns Adam's scaling, m_hat / (sqrt(v_hat) + eps), with both moments kept in 8 bits between updates.

    The arithmetic is fp32; m has a sign and v has none. Blocks lie along the last axis which is not 'embed', for a
    device which holds a part of D then holds whole blocks.

    Args:
      axes: tree of logical axis names like that of the parameters (None: blocks along the last axis).
    """

    def block_axes(params):
        leaves, structure = jax.tree.flatten(params)
        names = [(None,) * leaf.ndim for leaf in leaves] if axes is None else structure.flatten_up_to(axes)
        return [_block_axis(leaf.shape, own) for leaf, own in zip(leaves, names, strict=True)], leaves, structure

    def store(leaves, along, structure, signed):
        pairs = [(x, jnp.zeros(0)) if axis is None else quantize(x, axis, signed)
                 for x, axis in zip(leaves, along, strict=True)]  # fmt: skip
        return Moments(*(structure.unflatten(part) for part in zip(*pairs, strict=True)))

    def load(moments, along, structure, signed):
        parts = structure.flatten_up_to(moments.values), structure.flatten_up_to(moments.scales), along
        return [x if axis is None else dequantize(x, scales, axis, signed)
                for x, scales, axis in zip(*parts, strict=True)]  # fmt: skip

    def init(params):
        along, leaves, structure = block_axes(params)
        zeros = [jnp.zeros(leaf.shape) for leaf in leaves]
        return QuantizedAdamState(
            jnp.zeros((), jnp.int32), store(zeros, along, structure, True), store(zeros, along, structure, False)
        )

    def update(gradients, state, params=None):
        along, leaves, structure = block_axes(gradients)
        leaves = [leaf.astype(jnp.float32) for leaf in leaves]
        count = optax.safe_increment(state.count)
        mu = [b1 * m + (1 - b1) * g for m, g in zip(load(state.mu, along, structure, True), leaves, strict=True)]
        nu = [b2 * v + (1 - b2) * g**2 for v, g in zip(load(state.nu, along, structure, False), leaves, strict=True)]
        updates = [(m / (1 - b1**count)) / (jnp.sqrt(v / (1 - b2**count)) + eps) for m, v in zip(mu, nu, strict=True)]
        stored = store(mu, along, structure, True), store(nu, along, structure, False)
        return structure.unflatten(updates), QuantizedAdamState(count, *stored)

    return optax.GradientTransformation(init, update)


def _block_axis(shape: tuple[int, ...], names: tuple[str | None, ...]) -> int | None:
    """Returns the axis of a parameter's blocks, None if its moments stay in fp32."""
    if np.prod(shape) < SMALLEST or len(shape) < 2:
        return None
    return max((i for i, name in enumerate(names) if name not in ('embed', 'layers')), default=len(shape) - 1)
