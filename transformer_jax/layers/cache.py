"""The cache is data: what a decoder remembers of the tokens it has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.ops.masks import Mask
from transformer_jax.ops.quantized import QuantizedArray, quantize
from transformer_jax.sharding.activations import constrain


class Slots:
    """What a sequence mixer keeps of its tokens: arrays with an axis of slots, one slot for each token.

    Attributes:
      slot_axes: where that axis is, by array.
    """

    slot_axes: ClassVar[Mapping[str, int]]

    def write(self, new: Self, slot: jax.Array) -> Self:
        """Returns the slots with those of `new` from `slot` on, unchanged if they do not fit."""

        def put(axis, old, own):
            def written(old, own):
                start = [slot if i == axis else 0 for i in range(old.ndim)]
                return jax.lax.dynamic_update_slice(old, own.astype(old.dtype), start)

            def guarded(old, own):
                # As a branch it is written once and in place: XLA on CPU would fuse a plain update into each of its
                # readers, or with that of another array, and write to copies of the whole cache.
                fits = slot + own.shape[axis] <= old.shape[axis]
                if old.dtype != jnp.bfloat16:
                    return jax.lax.cond(fits, lambda: written(old, own), lambda: old)
                # As bits, for which the cache is copied twice; else it is made fp32 and back, which takes longer.
                bits, own_bits = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (old, own.astype(old.dtype)))
                new = jax.lax.cond(fits, lambda: written(bits, own_bits), lambda: bits)
                return jax.lax.bitcast_convert_type(new, old.dtype)

            return jax.lax.platform_dependent(old, own, cpu=guarded, default=written)

        return self._map(put, new).placed()

    def grow(self, more: int) -> Self:
        """Returns the slots with `more` empty ones behind them."""

        def wider(axis, old):
            return jnp.pad(old, [(0, more if i == axis else 0) for i in range(old.ndim)])

        return self._map(wider).placed()

    def take_slots(self, index_BS: jax.Array) -> Self:
        """Returns the slots of which slot s of row b is slot index_BS[b, s] of the old ones, or of their last one."""

        def take(axis, old):
            index = jnp.expand_dims(index_BS, [i for i in range(1, old.ndim) if i != axis])
            return jnp.take_along_axis(old, index, axis=axis, mode='clip')

        return self._map(take).placed()

    def placed(self) -> Self:
        """Returns the slots laid out over the mesh, rows and heads split."""
        raise NotImplementedError

    def _map(self, function: Callable[..., jax.Array], *others: Self) -> Self:
        """Returns `function(slot axis, array, arrays of the others)` of each array."""
        return self.replace(**{
            name: function(axis, *(getattr(slots, name) for slots in (self, *others)))
            for name, axis in self.slot_axes.items()
        })  # fmt: skip


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
    """

    mixer: KeysValues | Latents
    cross: KeysValues | None
    filled: jax.Array

    def write(self, new: KeysValues | Latents) -> KeysValues | Latents:
        """Returns the mixer's state with new tokens after the filled slots; `Cache.overflow` guards the end."""
        return self.mixer.write(new, self.filled)


@flax.struct.dataclass
class Cache:
    """The state of decoding: preallocated, passed in and returned.

    An entry has `capacity` slots, each for one token. A row's past is a set of slots of its entry, which is of itself
    alone, or of all beams of a sentence: these have the prompt in common, a beam which goes on from another takes over
    the set and not the slots, and all attend to the same keys, as they do to the source, each being shown its own past.

    Its size is entries x capacity x L x K x (key width + value width) numbers of the compute dtype, and for an
    encoder-decoder sentences x S x L x K x (key width + value width) more; of latent attention entries x capacity x L x
    (rank + rotary width). An int8 cache has as many numbers of one byte, and 2 x 2 bytes of scales for each K.

    Attributes:
      mixers: state of each layer's sequence mixer, an entry a row of its arrays.
      cross: keys and values of the source for each layer, empty before the first prefill or without a source.
      positions: (entries, capacity) position of the token in each slot, counting real tokens only.
      valid: (rows, capacity) the slots which are a row's past: real tokens only, so that padding is a masked slot.
      filled: slots in use, the same for all entries.
      overflow: whether a write past the end was refused; from then on results mean nothing.
      source: (sentences, S) source tokens, until the first prefill has encoded them.
      source_mask: (sentences, S) booleans.
      beams: rows which share an entry once `gather_beams` has made a row of the prompt into several.
    """

    mixers: tuple[KeysValues | Latents, ...]
    cross: tuple[KeysValues, ...]
    positions: jax.Array
    valid: jax.Array
    filled: jax.Array
    overflow: jax.Array
    source: jax.Array | None = None
    source_mask: jax.Array | None = None
    beams: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def capacity(self) -> int:
        """Slots an entry has."""
        return self.positions.shape[1]

    @property
    def rows_per_entry(self) -> int:
        """Rows which share an entry by now."""
        return self.valid.shape[0] // self.positions.shape[0]

    def extend(self, mask_BT: jax.Array) -> tuple[Cache, jax.Array, Mask]:
        """Returns the cache with more slots in use, the new tokens' positions (B, T), and the mask of their queries.

        B counts entries; where several rows share one, T counts the tokens of all of them, row after row. A write past
        the end sets `overflow`, and what is then returned means nothing.
        """
        T, sharing = mask_BT.shape[1], self.rows_per_entry
        mask_RT = mask_BT.astype(bool).reshape(self.valid.shape[0], -1)
        read = self.valid.sum(axis=1, keepdims=True)
        positions = (jnp.maximum(read + jnp.cumsum(mask_RT, axis=1) - 1, 0) * mask_RT).reshape(mask_BT.shape)
        # (rows, sharing, tokens of a row): in the slots of an entry's new tokens a row's own are those of its number.
        is_own = jnp.eye(sharing, dtype=bool)[jnp.arange(len(mask_RT)) % sharing]
        own = is_own[:, :, None] & mask_RT[:, None]

        def put(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new, self.filled, axis=1)

        cache = self.replace(
            positions=put(self.positions, positions),
            valid=put(self.valid, own.reshape(-1, T)),
            filled=self.filled + T,
            overflow=self.overflow | (self.filled + T > self.capacity),
        )
        return cache, positions, cache._mask(positions, self.filled)

    def _mask(self, positions_BT: jax.Array, offset: jax.Array) -> Mask:
        """Returns the mask of queries at these positions, whose tokens are in the slots from `offset` on."""
        (entries, T), sharing = positions_BT.shape, self.rows_per_entry
        if sharing == 1:
            own = dict(causal=True, key_valid_BS=self.valid)
        else:
            reached_TS = jnp.arange(self.capacity) <= offset + jnp.arange(T)[:, None]
            past = self.valid.reshape(entries, sharing, 1, -1) & reached_TS.reshape(sharing, T // sharing, -1)
            own = dict(shown_BTS=past.reshape(entries, T, -1))
        return Mask(query_positions_BT=positions_BT, key_positions_BS=self.positions, offset=offset, **own)

    def grow(self, capacity: int) -> Cache:
        """Returns the cache with `capacity` slots an entry, those beyond the old ones empty."""
        more = capacity - self.capacity

        def wider(rows):
            return jnp.pad(rows, [(0, 0), (0, more)])

        mixers = tuple(mixer.grow(more) for mixer in self.mixers)
        return self.replace(mixers=mixers, positions=wider(self.positions), valid=wider(self.valid))

    def forget(self, count: int, kept_B: jax.Array) -> Cache:
        """Returns the cache which has read only the first kept_B of the last `count` tokens of each row.

        Slots which no row needs any longer are free again; in rows which keep fewer they stay as masked slots. Each row
        has an entry of its own.
        """
        read = self.filled - count
        forgotten = jnp.arange(self.capacity) >= read + kept_B[:, None]
        return self.replace(
            positions=jnp.where(forgotten, 0, self.positions),
            valid=self.valid & ~forgotten,
            filled=read + kept_B.max(),
        )

    def needed(self, going_on_R: jax.Array) -> jax.Array:
        """Returns how many slots the pasts of these rows take, in the entry in which they take most."""
        return self._kept(going_on_R)[1].sum(axis=1).max()

    def pack(self, going_on_R: jax.Array | None = None) -> Cache:
        """Returns the cache with the slots of all pasts moved to the first ones, in their order; frees the rest.

        Args:
          going_on_R: rows which keep their past (None: all); the others lose it.
        """
        valid, kept = self._kept(going_on_R)
        count = jnp.cumsum(kept, axis=1)
        # Slot s takes the first one with s + 1 kept slots up to and with it; a sort would take a second to compile.
        numbers = jnp.arange(self.capacity)
        order = jax.vmap(lambda count: jnp.searchsorted(count, numbers + 1))(count)
        used = numbers < count[:, -1:]

        def take(order, used, x):
            return jnp.where(used, jnp.take_along_axis(x, order, axis=1, mode='clip'), 0)

        by_row = (jnp.repeat(x, self.rows_per_entry, axis=0) for x in (order, used))
        return self.replace(
            mixers=tuple(mixer.take_slots(order) for mixer in self.mixers),
            positions=take(order, used, self.positions),
            valid=take(*by_row, valid).astype(bool),
            filled=count[:, -1].max(),
        )

    def _kept(self, going_on_R):
        """Returns the pasts of these rows, and (entries, capacity) which slots are in one of them."""
        valid = self.valid if going_on_R is None else self.valid & going_on_R[:, None]
        return valid, valid.reshape(-1, self.rows_per_entry, self.capacity).any(axis=1)
