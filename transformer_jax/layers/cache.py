"""The cache is data: what a decoder remembers of the tokens it has read."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.ops.masks import Mask


@flax.struct.dataclass
class KeysValues:
    """Keys and values of one attention layer, the second with the width of a value head.

    Heads come before slots: the products want them so, and in another order a step would transpose the whole cache
    (a third of the time of a decoding step on a CPU).
    """

    key_BKSH: jax.Array
    value_BKSH: jax.Array

    @classmethod
    def of(cls, key_BSKH: jax.Array, value_BSKH: jax.Array) -> KeysValues:
        """Returns the projections of S tokens as they are stored."""
        return cls(jnp.swapaxes(key_BSKH, 1, 2), jnp.swapaxes(value_BSKH, 1, 2))

    @property
    def key_BSKH(self) -> jax.Array:
        """The keys in the order of the tokens' other arrays."""
        return jnp.swapaxes(self.key_BKSH, 1, 2)

    @property
    def value_BSKH(self) -> jax.Array:
        """The values in the order of the tokens' other arrays."""
        return jnp.swapaxes(self.value_BKSH, 1, 2)

    def write(self, new: KeysValues, slot: jax.Array) -> KeysValues:
        """Returns the cache with the keys and values of T more tokens from `slot` on; `Cache.extend` guards the end."""

        def put(old_BKSH, new_BKTH):
            return jax.lax.dynamic_update_slice_in_dim(old_BKSH, new_BKTH.astype(old_BKSH.dtype), slot, axis=2)

        return jax.tree.map(put, self, new)


@flax.struct.dataclass
class Latents:
    """What latent attention keeps of its tokens: the latent, then the rotated key which all heads share."""

    latent_BSR: jax.Array

    def write(self, new: Latents, slot: jax.Array) -> Latents:
        """Returns the cache with the latents of T more tokens from `slot` on; `Cache.extend` guards the end."""
        own = new.latent_BSR.astype(self.latent_BSR.dtype)
        return Latents(jax.lax.dynamic_update_slice_in_dim(self.latent_BSR, own, slot, axis=1))


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


@flax.struct.dataclass
class Cache:
    """The state of decoding: preallocated, passed in and returned.

    Its size is rows x capacity x L x K x (key width + value width) numbers of the compute dtype, and for an
    encoder-decoder sentences x S x L x K x (key width + value width) more; of latent attention rows x capacity x L x
    (rank + rotary width).

    Attributes:
      mixers: state of each layer's sequence mixer.
      cross: keys and values of the source for each layer, empty before the first prefill or without a source.
      positions: (rows, capacity) position of the token in each slot, counting real tokens only.
      valid: (rows, capacity) whether a slot holds a real token, so that padding on either side is a masked slot.
      filled: slots in use, the same for all rows.
      overflow: whether a write past the end was refused; from then on results mean nothing.
      source: (sentences, S) source tokens, until the first prefill has encoded them.
      source_mask: (sentences, S) booleans.
    """

    mixers: tuple[KeysValues | Latents, ...]
    cross: tuple[KeysValues, ...]
    positions: jax.Array
    valid: jax.Array
    filled: jax.Array
    overflow: jax.Array
    source: jax.Array | None = None
    source_mask: jax.Array | None = None

    @property
    def capacity(self) -> int:
        """Slots a row has."""
        return self.valid.shape[1]

    def extend(self, mask_BT: jax.Array) -> tuple[Cache, jax.Array, Mask]:
        """Returns the cache with T more slots in use, the new tokens' positions (B, T), and the mask of their queries.

        A write past the end sets `overflow` and goes to the last slots, which only a caller who ignores the flag sees.
        """
        mask_BT = mask_BT.astype(bool)
        read = self.valid.sum(axis=1, keepdims=True)
        positions = jnp.maximum(read + jnp.cumsum(mask_BT, axis=1) - 1, 0) * mask_BT
        T = mask_BT.shape[1]
        valid = jax.lax.dynamic_update_slice_in_dim(self.valid, mask_BT, self.filled, axis=1)
        slots = jax.lax.dynamic_update_slice_in_dim(self.positions, positions, self.filled, axis=1)
        cache = self.replace(
            positions=slots,
            valid=valid,
            filled=self.filled + T,
            overflow=self.overflow | (self.filled + T > self.capacity),
        )
        mask = Mask(
            causal=True,
            key_valid_BS=valid,
            query_positions_BT=positions,
            key_positions_BS=slots,
            offset=self.filled,
        )
        return cache, positions, mask
