"""The cache of a model: make it, read a prompt into it, take a step, re-order its rows."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.layers.cache import Cache, KeysValues, Latents, QuantizedKeysValues
from transformer_jax.models.checks import check_length, check_tokens
from transformer_jax.models.parameters import Params, unroll_params
from transformer_jax.models.transformer import build
from transformer_jax.ops.products import ColumnMajor
from transformer_jax.ops.quantized import QuantizedArray


def init_cache(
    model: nn.Module,
    batch: int,
    capacity: int,
    source: jax.Array | None = None,
    source_mask: jax.Array | None = None,
    beams: int = 1,
) -> Cache:
    """Returns an empty cache with `capacity` slots for each of `batch` rows.

    Args:
      capacity: tokens of a row; of beams, those of the prompt, and of all its beams together.
      source: (batch, S) tokens of an encoder-decoder's source, which the first `prefill` encodes, once per sentence.
      source_mask: (batch, S), 1 for real tokens (None: all are).
      beams: rows into which `gather_beams` is going to expand each row once the prompt is read. They share its slots,
        and their pasts are then reordered without moving them.

    Raises:
      UserError: if the model keeps no cache, or an encoder-decoder gets no source.
    """
    config = model.config
    if config.kind in ('encoder', 'vision'):
        raise UserError("an encoder has no cache; kind must be 'decoder' or 'encoder_decoder'")
    if (source is None) == (config.kind == 'encoder_decoder'):
        raise UserError(f"kind '{config.kind}' {'needs a' if source is None else 'takes no'} source")
    dtype = jnp.dtype(config.dtype)

    def new(of):
        def projected(width):
            return jax.ShapeDtypeStruct((batch, capacity, config.kv_heads, width), dtype)

        # Shapes only: XLA would fold the quantisation of zeros, for seconds where the cache is large.
        shapes = jax.eval_shape(of, projected(config.key_dim), projected(config.value_dim))
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

    def empty():
        if config.latent is not None:
            width = config.latent.kv_rank + config.latent.rotary_dim
            return Latents(jnp.zeros((batch, capacity, width), dtype))
        return new(QuantizedKeysValues.of if config.cache_dtype == 'int8' else KeysValues.of)

    if source is not None:
        source = jnp.asarray(source)
        source_mask = jnp.ones_like(source, bool) if source_mask is None else jnp.asarray(source_mask).astype(bool)
    return Cache(
        mixers=tuple(empty().placed() for _ in range(config.depth('decoder'))),
        cross=(),
        positions=jnp.zeros((batch, capacity), jnp.int32),
        valid=jnp.zeros((batch, capacity), bool),
        filled=jnp.zeros((), jnp.int32),
        overflow=jnp.zeros((), bool),
        source=source,
        source_mask=source_mask,
        beams=beams,
    )


def numbers_per_slot(config: ModelConfig) -> int:
    """Returns how many numbers a row keeps of a token: L K (key width + value width), or L (rank + rotary width)."""
    latent, width = config.latent, config.kv_heads * (config.key_dim + config.value_dim)
    return config.depth('decoder') * (width if latent is None else latent.kv_rank + latent.rotary_dim)


def for_decoding(model: nn.Module, params: Params) -> tuple[nn.Module, Params]:
    """Returns the model and its parameters with unrolled layers, which is how caches are read.

    A scan would copy each layer's cache at every step; unrolled layers are updated in place.
    """
    config: ModelConfig = model.config
    return build(config.replace(layer_stack='unrolled', remat='none')), unroll_params(params, config)


# (input axes, all axes) of the matrices which a step multiplies with, by the name of their layer.
_MATRICES = dict.fromkeys(('query', 'key', 'value'), (1, 3)) | {'out': (2, 3)}
_MATRICES |= dict.fromkeys(('up', 'gate', 'down', 'output'), (1, 2))


def for_steps(params: Params, rows: int) -> Params:
    """Returns unrolled parameters as steps of `rows` rows read them: on a CPU, fp32 matrices column after column.

    That takes a second copy of them (of tables none: they lie so), which pays over the steps of a search. A product
    with one row reads a matrix once in either order, and one with matrices on a mesh leaves them where they lie.
    """
    if jax.default_backend() != 'cpu' or rows == 1 or not jax.sharding.get_abstract_mesh().empty:
        return params

    def laid_out(path, leaf):
        *_, layer, name = ('', *(key.key for key in path))
        if name == 'embedding' and leaf.dtype == jnp.float32:
            return ColumnMajor(leaf)
        inputs, axes = _MATRICES.get(layer, (0, 0))
        known = name == 'kernel' and leaf.ndim == axes and leaf.dtype == jnp.float32
        return ColumnMajor.of(leaf, inputs) if known else leaf

    return jax.tree_util.tree_map_with_path(laid_out, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))


def prefill(
    model: nn.Module,
    params: Params,
    tokens: jax.Array,
    cache: Cache,
    mask: jax.Array | None = None,
    *,
    last_only: bool = False,
) -> tuple[jax.Array, Cache]:
    """Reads T tokens per row in one pass; returns their logits (B, T, V) and the new cache.

    It may be called again: a prompt read as 3 + 2 tokens gives the logits of the same 5 read at once.

    Args:
      tokens: (B, T); of an encoder-decoder, the decoder's inputs, first id the decoder start id.
      mask: (B, T), 1 for real tokens, which may be padded on either side (None: all are).
      last_only: return only the logits (B, 1, V) of each row's last real token; those of the others are not computed.

    Raises:
      UserError: outside jit, if the tokens do not fit, or for an id outside the vocabulary or a position past
        `max_positions`; inside, `cache.overflow` is set, and the others give NaN.
    """
    _check(model.config, cache, tokens, mask)
    return _read(model, last_only, params, tokens, cache, mask)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(model, last_only, params, tokens, cache, mask):
    model, params = for_decoding(model, params)
    (rows, T), entries = tokens.shape, cache.positions.shape[0]
    tokens = tokens.reshape(entries, -1)
    folded = None if mask is None else mask.reshape(entries, -1)
    if model.config.kind == 'encoder_decoder':
        out = model.apply({'params': params}, target_tokens=tokens, target_mask=folded, cache=cache)
    else:
        out = model.apply({'params': params}, tokens, mask=folded, cache=cache)
    if not last_only:
        return out.logits.reshape(rows, T, -1), out.cache
    real_RT = jnp.ones((rows, T), bool) if mask is None else jnp.asarray(mask)
    last_R = T - 1 - jnp.argmax(real_RT[:, ::-1], axis=1)
    hidden = jnp.take_along_axis(out.hidden.reshape(rows, T, -1), last_R[:, None, None], axis=1)
    return model.apply({'params': params}, hidden, method='logits'), out.cache


def step(model: nn.Module, params: Params, tokens_B1: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Reads one token per row; returns its logits (B, 1, V) and the new cache. Errors as in `prefill`."""
    return prefill(model, params, tokens_B1, cache)


def gather_beams(cache: Cache, index: jax.Array) -> Cache:
    """Returns the cache whose row r continues row index[r] of the old one.

    Keys and values of the source stay, and so do slots which beams share: they belong to sentences, and row r to
    sentence r // (rows / sentences), so index[r] must be a row of the same sentence. With more new rows than old ones
    it expands sentences to beams.

    Args:
      index: (new rows,) numbers of old rows.
    """

    def take(rows):
        return rows[index]

    if cache.beams > 1:
        return cache.replace(valid=take(cache.valid))
    mixers = tuple(jax.tree.map(take, mixer).placed() for mixer in cache.mixers)
    return cache.replace(mixers=mixers, positions=take(cache.positions), valid=take(cache.valid))


def _check(config: ModelConfig, cache: Cache, tokens: jax.Array, mask: jax.Array | None):
    check_tokens(tokens, config.vocab_size)
    if isinstance(cache.filled, jax.core.Tracer):
        return
    T = tokens.shape[1]
    more = T * cache.rows_per_entry
    if int(cache.filled) + more > cache.capacity:
        raise UserError(
            f'the cache has {cache.capacity} slots, of which {int(cache.filled)} are filled; '
            f'{more} more tokens do not fit'
        )
    if config.max_positions is not None:
        real = jnp.ones_like(tokens) if mask is None else jnp.asarray(mask)
        _, positions, _ = cache.extend(real.reshape(cache.positions.shape[0], -1))
        check_length(config, positions, T)
