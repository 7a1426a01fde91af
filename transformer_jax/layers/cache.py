"""The cache is data: what a decoder remembers of the tokens it has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.ops.masks import Mask
from transformer_jax.ops.quantized import QuantizedArray, quantize
from transformer_jax.sharding.activations import constrain


class Lanes(NamedTuple):
    """Rows which share an entry of the cache: how many have slots in it, one after another, and how many read now."""

    stored: int = 1
    reading: int = 1


class Slots:
    """What a sequence mixer keeps of its tokens: arrays with an axis of slots, one slot for each token.

    Attributes:
      slot_axes: where that axis is, by array.
    """

    slot_axes: ClassVar[Mapping[str, int]]

    def write(self, new: Self, slot: jax.Array, lanes: Lanes) -> Self:
        """Returns the slots with those of `new` from `slot` of each reading lane on, unchanged if they do not fit."""

        def put(axis, old, own):
            def written(old, own):
                whole, part = _split(old, axis, lanes.stored), _split(own.astype(old.dtype), axis, lanes.reading)
                start = [slot if i == axis + 1 else 0 for i in range(whole.ndim)]
                return jax.lax.dynamic_update_slice(whole, part, start).reshape(old.shape)

            def guarded(old, own):
                # As a branch it is written once and in place: XLA on CPU would fuse a plain update into each of its
                # readers, or with that of another array, and write to copies of the whole cache.
                fits = slot + own.shape[axis] // lanes.reading <= old.shape[axis] // lanes.stored
                return jax.lax.cond(fits, lambda: written(old, own), lambda: old)

            return jax.lax.platform_dependent(old, own, cpu=guarded, default=written)

        return self._map(put, new).placed()

    def grow(self, more: int, lanes: Lanes) -> Self:
        """Returns the slots with `more` empty ones at the end of each stored lane."""

        def wider(axis, old):
            whole = _split(old, axis, lanes.stored)
            padded = jnp.pad(whole, [(0, more if i == axis + 1 else 0) for i in range(whole.ndim)])
            return padded.reshape(*old.shape[:axis], -1, *old.shape[axis + 1 :])

        return self._map(wider).placed()

    def take_slots(self, index_BS: jax.Array) -> Self:
        """Returns the slots of which slot s of row b is slot index_BS[b, s] of the old ones."""

        def take(axis, old):
            index = jnp.expand_dims(index_BS, [i for i in range(1, old.ndim) if i != axis])
            return jnp.take_along_axis(old, index, axis=axis)

        return self._map(take)

    def placed(self) -> Self:
        """Returns the slots laid out over the mesh, rows and heads split."""
        raise NotImplementedError

    def _map(self, function: Callable[..., jax.Array], *others: Self) -> Self:
        """Returns `function(slot axis, array, arrays of the others)` of each array."""
        return self.replace(**{
            name: function(axis, *(getattr(slots, name) for slots in (self, *others)))
            for name, axis in self.slot_axes.items()
        })  # fmt: skip


def _split(x: jax.Array, axis: int, lanes: int) -> jax.Array:
    """Returns the array with the slots of each lane along an axis of their own."""
    return x.reshape(*x.shape[:axis], lanes, x.shape[axis] // lanes, *x.shape[axis + 1 :])


@flax.struct.dataclass
class KeysValues(Slots):
    """Keys and values of one attention layer, the second with the width of a value head.

    Their axes stand as the products of a step want them, since in another order a step would transpose the whole cache
    (on a CPU a product of four queries with keys of width 64 takes a quarter of the time so).
    """

    slot_axes: ClassVar[Mapping[str, int]] = {'key_BKHS': 3, 'value_BKSH': 2}

    key_BKHS: jax.Array
    value_BKSH: jax.Array

    @classmethod
    def of(cls, key_BSKH: jax.Array, value_BSKH: jax.Array) -> KeysValues:
        """Returns the projections of S tokens as they are stored."""
        return cls(jnp.transpose(key_BSKH, (0, 2, 3, 1)), jnp.swapaxes(value_BSKH, 1, 2))

    @property
    def key_BSKH(self) -> jax.Array:
        """The keys in the order of the tokens' other arrays."""
        return jnp.transpose(self.key_BKHS, (0, 3, 1, 2))

    @property
    def value_BSKH(self) -> jax.Array:
        """The values in the order of the tokens' other arrays."""
        return jnp.swapaxes(self.value_BKSH, 1, 2)

    def placed(self) -> KeysValues:
        """Returns the cache laid out over the mesh, rows and heads split."""
        return jax.tree.map(lambda x: constrain(x, 'batch', 'kv_heads', None, None), self)


@flax.struct.dataclass
class QuantizedKeysValues(KeysValues):
    """Keys and values as int8, each token's head with a scale of its own, the largest absolute number over 127.5.

    Attributes:
      key_scale_BK1S, value_scale_BKS1: bf16.
      dtype: of the arrays which attention is given.
    """

    slot_axes: ClassVar[Mapping[str, int]] = KeysValues.slot_axes | {'key_scale_BK1S': 3, 'value_scale_BKS1': 2}

    key_scale_BK1S: jax.Array
    value_scale_BKS1: jax.Array
    dtype: str = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, key_BSKH: jax.Array, value_BSKH: jax.Array) -> QuantizedKeysValues:
        """Returns the projections of S tokens as they are stored."""
        own = KeysValues.of(key_BSKH, value_BSKH)
        B, K, _, S = own.key_BKHS.shape
        key, value = quantize(own.key_BKHS, 8, (B, K, 1, S)), quantize(own.value_BKSH, 8, (B, K, S, 1))
        return cls(key.values, value.values, key.scale, value.scale, str(key_BSKH.dtype))

    @property
    def key_BSKH(self) -> jax.Array:
        """The keys in the order of the tokens' other arrays."""
        key_BKHS = QuantizedArray(self.key_BKHS, self.key_scale_BK1S).astype(self.dtype)
        return jnp.transpose(key_BKHS, (0, 3, 1, 2))

    @property
    def value_BSKH(self) -> jax.Array:
        """The values in the order of the tokens' other arrays."""
        return jnp.swapaxes(QuantizedArray(self.value_BKSH, self.value_scale_BKS1).astype(self.dtype), 1, 2)


@flax.struct.dataclass
class Latents(Slots):
    """What latent attention keeps of its tokens: the latent, then the rotated key which all heads share."""

    slot_axes: ClassVar[Mapping[str, int]] = {'latent_BSR': 1}

    latent_BSR: jax.Array

    def placed(self) -> Latents:
        """Returns the cache laid out over the mesh, rows split."""
        return Latents(constrain(self.latent_BSR, 'batch', None, None))


@flax.struct.dataclass
class LayerCache:
    """What one layer remembers.

    Attributes:
      mixer: state of its sequence mixer, `KeysValues` for attention and `Latents` for latent attention.
      cross: keys and values of the source, one row per sentence, not per beam; None before they are made.
      filled: slots of the mixer in use before this call, the same for all layers.
      lanes: rows which share an entry of the mixer.
    """

    mixer: KeysValues | Latents
    cross: KeysValues | None
    filled: jax.Array
    lanes: Lanes = flax.struct.field(pytree_node=False, default=Lanes())

    def write(self, new: KeysValues | Latents) -> KeysValues | Latents:
        """Returns the mixer's state with new tokens after the filled slots; `Cache.overflow` guards the end."""
        return self.mixer.write(new, self.filled, self.lanes)


@flax.struct.dataclass
class Cache:
    """The state of decoding: preallocated, passed in and returned.

    Its size is rows x capacity x L x K x (key width + value width) numbers of the compute dtype, and for an
    encoder-decoder sentences x S x L x K x (key width + value width) more; of latent attention rows x capacity x L x
    (rank + rotary width). An int8 cache has as many numbers of one byte, and 2 x 2 bytes of scales for each K.

    With `beams` > 1 the beams of a sentence have one entry, each its own slots in it, and a beam which goes on from
    another takes over a list of whose slots are its past, not the slots themselves. All beams attend to the same keys,
    as they do to the source, and each is shown its own past.

    Attributes:
      mixers: state of each layer's sequence mixer.
      cross: keys and values of the source for each layer, empty before the first prefill or without a source.
      positions: (rows, capacity) position of the token in each slot, counting real tokens only.
      valid: (rows, capacity) whether a slot holds a real token, so that padding on either side is a masked slot.
      filled: slots in use, the same for all rows.
      overflow: whether a write past the end was refused; from then on results mean nothing.
      source: (sentences, S) source tokens, until the first prefill has encoded them.
      source_mask: (sentences, S) booleans.
      ancestors: (rows, capacity) the beam of the sentence in whose slot the row's token lies; None while there is one
        row per entry.
      beams: rows for which an entry has slots.
    """

    mixers: tuple[KeysValues | Latents, ...]
    cross: tuple[KeysValues, ...]
    positions: jax.Array
    valid: jax.Array
    filled: jax.Array
    overflow: jax.Array
    source: jax.Array | None = None
    source_mask: jax.Array | None = None
    ancestors: jax.Array | None = None
    beams: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def capacity(self) -> int:
        """Slots a row has."""
        return self.valid.shape[1]

    @property
    def lanes(self) -> Lanes:
        """Rows which share an entry, and how many of them read."""
        return Lanes(self.beams, 1 if self.ancestors is None else self.beams)

    def extend(self, mask_BT: jax.Array) -> tuple[Cache, jax.Array, Mask]:
        """Returns the cache with more slots in use, the new tokens' positions (B, T), and the mask of their queries.

        B counts entries; where several rows share one, T counts the tokens of all of them, row after row. A write past
        the end sets `overflow`, and what is then returned means nothing.
        """
        mask_RT = mask_BT.astype(bool).reshape(self.valid.shape[0], -1)
        read = self.valid.sum(axis=1, keepdims=True)
        positions = jnp.maximum(read + jnp.cumsum(mask_RT, axis=1) - 1, 0) * mask_RT
        T = mask_RT.shape[1]

        def put(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new, self.filled, axis=1)

        cache = self.replace(
            positions=put(self.positions, positions),
            valid=put(self.valid, mask_RT),
            filled=self.filled + T,
            overflow=self.overflow | (self.filled + T > self.capacity),
        )
        if self.ancestors is not None:
            own = jnp.arange(mask_RT.shape[0])[:, None] % self.beams
            cache = cache.replace(ancestors=put(self.ancestors, jnp.broadcast_to(own, mask_RT.shape)))
        positions = positions.reshape(mask_BT.shape)
        return cache, positions, cache._mask(positions, self.filled, T)

    def _mask(self, positions_BT: jax.Array, offset: jax.Array, T: int) -> Mask:
        """Returns the mask of queries at these positions, the last T tokens of each row, the first in slot `offset`."""
        entries = positions_BT.shape[0]
        if self.ancestors is None:
            # Slots of beams which do not exist yet stand behind all others, so no query sees them.
            unused = [(0, 0), (0, (self.beams - 1) * self.capacity)]
            valid, slots = jnp.pad(self.valid, unused), jnp.pad(self.positions, unused)
            own = dict(causal=True, key_valid_BS=valid)
        else:
            slots = self.positions.reshape(entries, -1)
            # (rows, beams, capacity): a row's past, in the slots of the beams which read it.
            past = (self.ancestors[:, None] == jnp.arange(self.beams)[:, None]) & self.valid[:, None]
            reached = jnp.arange(self.capacity) <= offset + jnp.arange(T)[:, None]
            shown = past[:, None] & reached[:, None]
            own = dict(shown_BTS=shown.reshape(entries, -1, self.beams * self.capacity))
        return Mask(query_positions_BT=positions_BT, key_positions_BS=slots, offset=offset, **own)

    def grow(self, capacity: int) -> Cache:
        """Returns the cache with `capacity` slots a row, those beyond the old ones empty."""
        more = capacity - self.capacity

        def wider(rows):
            return None if rows is None else jnp.pad(rows, [(0, 0), (0, more)])

        return self.replace(
            mixers=tuple(mixer.grow(more, self.lanes) for mixer in self.mixers),
            positions=wider(self.positions),
            valid=wider(self.valid),
            ancestors=wider(self.ancestors),
        )

    def forget(self, count: int, kept_B: jax.Array) -> Cache:
        """Returns the cache which has read only the first kept_B of the last `count` tokens of each row.

        Slots which no row needs any longer are free again; in rows which keep fewer they stay as masked slots.
        """
        read = self.filled - count
        forgotten = jnp.arange(self.capacity) >= read + kept_B[:, None]
        return self.replace(
            positions=jnp.where(forgotten, 0, self.positions),
            valid=self.valid & ~forgotten,
            filled=read + kept_B.max(),
        )

    def pack(self) -> Cache:
        """Returns the cache with each row's real tokens moved to its first slots, in their order; frees the rest."""
        order = jnp.argsort(~self.valid, axis=1, stable=True)
        return self.replace(
            mixers=tuple(mixer.take_slots(order) for mixer in self.mixers),
            positions=jnp.take_along_axis(self.positions, order, axis=1),
            valid=jnp.take_along_axis(self.valid, order, axis=1),
            filled=self.valid.sum(axis=1).max(),
        )
