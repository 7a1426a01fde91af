"""Scaled dot-product attention: one function, several programs for it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.errors import choose
from transformer_jax.ops.dropout import dropout
from transformer_jax.ops.masks import Mask
from transformer_jax.ops.products import einsum

_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
_QUERY_BLOCK = 128
# From here on `auto` takes the blockwise program: a row of scores then no longer fits a cache.
_BLOCKWISE_FROM = 2048


class Dropout(NamedTuple):
    """The rate and key of dropout on attention weights."""

    rate: float
    key: jax.Array


def attention(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    mask: Mask,
    *,
    scale: float,
    bias_BNTS: jax.Array | None = None,
    softcap: float | None = None,
    drop: Dropout | None = None,
    backend: str = 'auto',
    return_weights: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns softmax(cap(scale Q K^T) + bias, over the keys the mask shows) V, and the weights if asked for.

    A query which sees no key gets zeros. With K < N key heads, head n uses key head n // (N / K) (grouped-query
    attention, Ainslie et al. 2023; K = 1 is multi-query, Shazeer 2019). cap(x) = softcap tanh(x / softcap).
    Scores and softmax are fp32 whatever the operands are. Vaswani et al. 2017, section 3.2.1.

    Args:
      query_BTNH, key_BSKH, value_BSKH: the value head may have another width than H.
      mask: which key a query sees.
      scale: 1 / sqrt(H) in the paper.
      bias_BNTS: added to the scores; B and T may be 1.
      backend: 'reference' holds all scores, 'blockwise' those of 128 queries at a time (O(T) memory, forward and
        backward), 'auto' takes the first of them that is fit for the size.
      return_weights: also give the weights BNTS, before dropout; this is the reference's.

    Raises:
      UserError: for an unknown backend.
    """
    choose('attention_backend', backend, ('auto', 'reference', 'blockwise'))
    T, S = query_BTNH.shape[1], key_BSKH.shape[1]
    if backend == 'auto':
        backend = 'blockwise' if T > 1 and S >= _BLOCKWISE_FROM else 'reference'
    if return_weights or backend == 'reference':
        out, weights = _rows(query_BTNH, key_BSKH, value_BSKH, mask.visible(T, S), bias_BNTS, scale, softcap, drop)
        return out, weights if return_weights else None
    return _blockwise(query_BTNH, key_BSKH, value_BSKH, mask, bias_BNTS, scale, softcap, drop), None


def _rows(query_BTNH, key_BSKH, value_BSKH, visible_BTS, bias_BNTS, scale, softcap, drop):
    B, T, N, H = query_BTNH.shape
    S, K = key_BSKH.shape[1:3]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
    # Scaled as fp32 scores: a scaled query would be rounded twice, and so would a scale which is no power of two.
    scores = scale * einsum('BTKGH,BSKH->BKGTS', query_BTKGH, key_BSKH, jnp.float32)
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
    out = einsum('BKGTS,BSKV->BTKGV', dropped.astype(value_BSKH.dtype), value_BSKH)
    return out.reshape(B, T, N, -1), weights.reshape(B, N, T, S)


def _blockwise(query_BTNH, key_BSKH, value_BSKH, mask, bias_BNTS, scale, softcap, drop):
    """One block of queries after another; the backward pass makes each block's scores anew."""
    B, T, N, H = query_BTNH.shape
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
        return _rows(query, key_BSKH, value_BSKH, visible, bias, scale, softcap, own)[0]

    out = jax.lax.map(block, jnp.arange(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(B, blocks * _QUERY_BLOCK, N, -1)[:, :T]


def _pad_rows(x_BT, length):
    return None if x_BT is None else jnp.pad(x_BT, [(0, 0), (0, length - x_BT.shape[1])])
