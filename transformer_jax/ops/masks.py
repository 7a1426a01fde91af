"""Symbolic masks: conditions on which key a query sees, turned into an array in one place."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Mask:
    """A conjunction of conditions, each absent when None; `a & b` holds where both hold.

    Causality is a matter of order in the array (query i of T stands at `offset + i`, by default S - T + i, so that the
    last query lines up with the last key); a window is a distance of positions, which count real tokens only.

    Attributes:
      causal: a query sees no key which stands after it.
      window: |query position - key position| < window, so a causal query sees `window` keys, itself included.
      prefix_B: keys of the first `prefix_B` slots are seen by all (prefix LM, Raffel et al. 2020, section 3.2.3).
      key_valid_BS: keys which are real tokens.
      query_segments_BT, key_segments_BS: only keys of the query's own segment are seen, and segment 0 sees nothing.
      query_positions_BT, key_positions_BS: positions for the window (None: the order in the array).
      offset: the slot of the first query (None: S - T).
      shown_BTS: the keys which each query sees, where no rule says it.
    """

    causal: bool = flax.struct.field(pytree_node=False, default=False)
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    prefix_B: jax.Array | None = None
    key_valid_BS: jax.Array | None = None
    query_segments_BT: jax.Array | None = None
    key_segments_BS: jax.Array | None = None
    query_positions_BT: jax.Array | None = None
    key_positions_BS: jax.Array | None = None
    offset: jax.Array | None = None
    shown_BTS: jax.Array | None = None

    def __and__(self, other: Mask) -> Mask:
        merged = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            merged[field.name] = theirs if mine is None else mine if theirs is None else _JOIN[field.name](mine, theirs)
        return Mask(**merged)

    def visible(self, T: int, S: int, rows: jax.Array | None = None) -> jax.Array | None:
        """Returns the mask as booleans (B or 1, T, S), True where a query sees a key, or None if all see all.

        Args:
          T, S: numbers of queries and keys.
          rows: numbers of the queries which are asked for, in any order (None: all T).
        """
        offset = S - T if self.offset is None else self.offset
        query_slots = offset + (jnp.arange(T) if rows is None else rows)[None, :, None]
        key_slots = jnp.arange(S)[None, None, :]

        def of_queries(x_BT):
            return x_BT if rows is None else jnp.take(x_BT, rows, axis=1, mode='clip')

        conditions = []
        if self.causal:
            seen = key_slots <= query_slots
            if self.prefix_B is not None:
                seen |= key_slots < self.prefix_B[:, None, None]
            conditions.append(seen)
        if self.window is not None:
            queries = query_slots if self.query_positions_BT is None else of_queries(self.query_positions_BT)[..., None]
            keys = key_slots if self.key_positions_BS is None else self.key_positions_BS[:, None, :]
            conditions.append(abs(queries - keys) < self.window)
        if self.key_valid_BS is not None:
            conditions.append(self.key_valid_BS[:, None, :])
        if self.query_segments_BT is not None:
            keys = self.key_segments_BS[:, None, :]
            conditions.append((of_queries(self.query_segments_BT)[..., None] == keys) & (keys != 0))
        if self.shown_BTS is not None:
            conditions.append(of_queries(self.shown_BTS))
        if not conditions:
            return None
        result = conditions[0]
        for condition in conditions[1:]:
            result = result & condition
        return result


def _only_one(mine, theirs):
    raise ValueError('two masks which both state segments, positions, a prefix, an offset or keys cannot be joined')


_JOIN = {field.name: _only_one for field in dataclasses.fields(Mask)} | {
    'causal': lambda mine, theirs: mine or theirs,
    'window': min,
    'key_valid_BS': lambda mine, theirs: mine & theirs,
}


def positions_from_mask(mask_BT: jax.Array) -> jax.Array:
    """Returns positions which count real tokens only, 0 on padding: [0, 0, 1, 1] gives [0, 0, 0, 1]."""
    mask_BT = mask_BT.astype(jnp.int32)
    return jnp.maximum(jnp.cumsum(mask_BT, axis=1) - 1, 0) * mask_BT


def positions_from_segments(segments_BT: jax.Array) -> jax.Array:
    """Returns positions which restart with each segment, 0 on padding: [1, 1, 2, 2, 0] gives [0, 1, 0, 1, 0]."""
    index = jnp.arange(segments_BT.shape[1])[None, :]
    before = jnp.pad(segments_BT, [(0, 0), (1, 0)], constant_values=-1)[:, :-1]
    begins = segments_BT != before
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return jnp.where(segments_BT != 0, index - start, 0)
