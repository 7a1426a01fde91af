"""Attention as XLA compiles it: all scores at once, or those of one block of queries after another.

Both support every mask, bias, soft-cap, dropout, width and dtype.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from transformer_jax.ops.attention_inputs import Inputs
from transformer_jax.ops.dropout import dropout, numbers
from transformer_jax.ops.products import einsum
from transformer_jax.sharding.activations import axes_of, constrain, current_mesh

_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
_QUERY_BLOCK = 128


def reference(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns (out BTNV, weights BNTS before dropout); holds all scores."""
    return _rows(inputs, inputs.mask.visible(*inputs.lengths))


def _rows(
    inputs: Inputs, visible_BTS: jax.Array | None, numbers_BNTS: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    query_BTNH, key_BSKH, value_BSKH, _, scale, bias_BNTS, softcap, drop = inputs
    B, T, N, H = query_BTNH.shape
    S, K = key_BSKH.shape[1:3]
    # Operands and results in the order of the products: a CPU would transpose not only them but the scores too.
    query_BKGTH = jnp.moveaxis(query_BTNH.reshape(B, T, K, N // K, H), 1, 3)
    # Scaled as fp32 scores: a scaled query would be rounded twice, and so would a scale which is no power of two.
    scores = scale * einsum('BKGTH,BSKH->BKGTS', query_BKGTH, key_BSKH, jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias_BNTS is not None:
        scores += bias_BNTS.astype(jnp.float32).reshape(bias_BNTS.shape[0], K, N // K, *bias_BNTS.shape[2:])
    if visible_BTS is not None:
        visible = visible_BTS[:, None, None]
        scores = jnp.where(visible, scores, _HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1)
    if visible_BTS is not None:
        weights = jnp.where(visible, weights, 0.0)
    dropped = weights
    if drop is not None:
        index = None if numbers_BNTS is None else numbers_BNTS.reshape(weights.shape)
        dropped = dropout(weights, drop.rate, drop.key, index)
    out_BKGTV = einsum('BKGTS,BSKV->BKGTV', dropped.astype(value_BSKH.dtype), value_BSKH)
    return jnp.moveaxis(out_BKGTV, 3, 1).reshape(B, T, N, -1), weights.reshape(B, N, T, S)


def blockwise(inputs: Inputs) -> jax.Array:
    """Returns out BTNV with the scores of 128 queries at a time; the backward pass makes them anew (O(T) memory).

    On a mesh whose sequence axis splits T into Q parts, each device takes 128 of its own queries at a time. Each part
    has a copy of the keys and values, which lie there anyway, so that their gradients are added up over the blocks on
    the device, and then once over the parts. Dropout drops what the reference's drops, on any mesh.
    """
    query_BTNH, key_BSKH, value_BSKH, bias_BNTS = *inputs[:3], inputs.bias_BNTS
    (T, S), (B, _, N, _) = inputs.lengths, query_BTNH.shape
    mesh = current_mesh()
    Q = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes_of('length', T, mesh))
    own = T // Q
    blocks = -(-own // _QUERY_BLOCK)

    def cut(x, axis):
        """(..., own, ...) -> (blocks, ..., 128, ...), filled up with zeros."""
        x = jnp.pad(x, [(0, blocks * _QUERY_BLOCK - own if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], blocks, _QUERY_BLOCK, *x.shape[axis + 1 :]), axis, 0)

    rows_of_bias = bias_BNTS is not None and bias_BNTS.shape[2] > 1

    def part(first, query, key, value, bias):
        """The queries first ... first + own - 1."""

        @jax.checkpoint
        def block(operands):
            rows, query, own_bias = operands
            its = inputs._replace(
                query_BTNH=query, key_BSKH=key, value_BSKH=value, bias_BNTS=own_bias if rows_of_bias else bias
            )
            index = None if inputs.drop is None else _numbers(B, N, rows, T, S)
            return _rows(its, inputs.mask.visible(T, S, rows), index)[0]

        rows = first + jnp.arange(blocks * _QUERY_BLOCK).reshape(blocks, _QUERY_BLOCK)
        out = jax.lax.map(block, (rows, cut(query, 1), cut(bias, 2) if rows_of_bias else None))
        return jnp.moveaxis(out, 0, 1).reshape(B, blocks * _QUERY_BLOCK, N, -1)[:, :own]

    if Q == 1:
        return part(0, query_BTNH, key_BSKH, value_BSKH, bias_BNTS)
    query = constrain(query_BTNH.reshape(B, Q, own, N, -1), 'batch', 'length', None, 'heads', None)
    copies = (
        constrain(jnp.broadcast_to(x[:, None], (B, Q, *x.shape[1:])), 'batch', 'length', None, 'kv_heads', None)
        for x in (key_BSKH, value_BSKH)
    )
    if rows_of_bias:
        bias_BNTS = bias_BNTS.reshape(*bias_BNTS.shape[:2], Q, own, S)
        bias_BNTS = constrain(bias_BNTS, 'batch', 'heads', 'length', None, None)
    parts = jax.vmap(part, in_axes=(0, 1, 1, 1, 2 if rows_of_bias else None), out_axes=1)
    return parts(own * jnp.arange(Q), query, *copies, bias_BNTS).reshape(B, T, N, -1)


def _numbers(B: int, N: int, rows_t: jax.Array, T: int, S: int) -> jax.Array:
    """Returns the numbers of a block's weights, BNtS, among those of all BNTS."""
    rows = numbers((B, N, 1, 1)) * jnp.uint32(T) + rows_t.astype(jnp.uint32)[:, None]
    return rows * jnp.uint32(S) + jnp.arange(S, dtype=jnp.uint32)
