"""Attention as XLA compiles it: all scores at once, or those of one block of queries after another.

Both support every mask, bias, soft-cap, dropout, width and dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.ops.attention_inputs import Dropout, Inputs
from transformer_jax.ops.dropout import dropout
from transformer_jax.ops.products import einsum

_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
_QUERY_BLOCK = 128


def reference(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns (out BTNV, weights BNTS before dropout); holds all scores."""
    return _rows(inputs, inputs.mask.visible(*inputs.lengths))


def _rows(inputs: Inputs, visible_BTS: jax.Array | None) -> tuple[jax.Array, jax.Array]:
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
    dropped = weights if drop is None else dropout(weights, drop.rate, drop.key)
    out_BKGTV = einsum('BKGTS,BSKV->BKGTV', dropped.astype(value_BSKH.dtype), value_BSKH)
    return jnp.moveaxis(out_BKGTV, 3, 1).reshape(B, T, N, -1), weights.reshape(B, N, T, S)


def blockwise(inputs: Inputs) -> jax.Array:
    """Returns out BTNV with the scores of 128 queries at a time; the backward pass makes them anew (O(T) memory)."""
    query_BTNH, key_BSKH, value_BSKH, mask, _, bias_BNTS, _, drop = inputs
    B, T, N, _ = query_BTNH.shape
    S = key_BSKH.shape[1]
    blocks = -(-T // _QUERY_BLOCK)
    padded = [(0, 0), (0, blocks * _QUERY_BLOCK - T), (0, 0), (0, 0)]
    query_BTNH = jnp.pad(query_BTNH, padded)
    offset = S - T if mask.offset is None else mask.offset
    mask = mask.replace(
        offset=offset,
        query_segments_BT=_pad_rows(mask.query_segments_BT, blocks * _QUERY_BLOCK),
        query_positions_BT=_pad_rows(mask.query_positions_BT, blocks * _QUERY_BLOCK),
    )
    rows_of_bias = bias_BNTS is not None and bias_BNTS.shape[2] > 1
    if rows_of_bias:
        bias_BNTS = jnp.pad(bias_BNTS, [(0, 0), (0, 0), padded[1], (0, 0)])

    @jax.checkpoint
    def block(index):
        start = index * _QUERY_BLOCK
        query = jax.lax.dynamic_slice_in_dim(query_BTNH, start, _QUERY_BLOCK, axis=1)
        bias = jax.lax.dynamic_slice_in_dim(bias_BNTS, start, _QUERY_BLOCK, axis=2) if rows_of_bias else bias_BNTS
        own = None if drop is None else Dropout(drop.rate, jax.random.fold_in(drop.key, index))
        visible = mask.visible(T, S, start, _QUERY_BLOCK)
        return _rows(inputs._replace(query_BTNH=query, bias_BNTS=bias, drop=own), visible)[0]

    out = jax.lax.map(block, jnp.arange(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(B, blocks * _QUERY_BLOCK, N, -1)[:, :T]


def _pad_rows(x_BT, length):
    return None if x_BT is None else jnp.pad(x_BT, [(0, 0), (0, length - x_BT.shape[1])])
