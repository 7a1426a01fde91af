"""Reading through the cache equals the full forward pass, over the grid of choices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import model_and_params, some_tokens, tiny

from transformer_jax.config import NORM_POSITIONS, RopeScaling
from transformer_jax.decoding.cache_api import for_decoding, for_steps, gather_beams, init_cache, prefill, step
from transformer_jax.errors import UserError
from transformer_jax.ops.products import ColumnMajor
from transformer_jax.subconfigs import LatentConfig, MixtureConfig

pytestmark = pytest.mark.usefixtures('quick_compilation')

WIDTH, CAPACITY = 6, 8
# Prompts of four slots padded on the right, on the left and not at all; then two more words for each.
MASK = np.array([[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
TOKENS = some_tokens(3, WIDTH)
SOURCE = some_tokens(3, WIDTH, seed=1)
SOURCE_MASK = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
CHUNKS = (3, 1, 1, 1)

SCHEMES = {
    'sinusoidal': {},
    'sinusoidal_halves': dict(position='sinusoidal_halves'),
    'learned': dict(position='learned', position_offset=2, embedding_norm=True),
    'rope': dict(position='rope', rope_layout='interleaved', qk_norm='head'),
    'rope_yarn': dict(position='rope', rope_scaling=RopeScaling('yarn', 4.0, 16)),
    'alibi': dict(position='alibi'),
    'relative': dict(position='relative', relative_buckets=8, relative_max_distance=6),
    'none': dict(position='none'),
}
HEADS = {
    'each_its_own': {},
    'grouped': dict(num_kv_heads=2, attention_softcap=1.0),
    'one': dict(num_kv_heads=1),
    'window': dict(layer_pattern=('local', 'global'), window=2, num_layers=3),
}


def grid():
    """Every scheme with two kinds of heads, every placement with two or more schemes; encoder-decoders besides."""
    norms = itertools.cycle(NORM_POSITIONS)
    for i, scheme in enumerate(SCHEMES):
        for heads in ('each_its_own' if i % 2 else 'window', 'grouped'):
            yield 'decoder', scheme, heads, next(norms)
    for scheme, heads, norm in zip(
        ('sinusoidal', 'relative', 'rope', 'learned', 'alibi'),
        ('grouped', 'each_its_own', 'window', 'one', 'each_its_own'), NORM_POSITIONS[:5], strict=True,
    ):  # fmt: skip
        yield 'encoder_decoder', scheme, heads, norm


def whole_pass(model, params, config):
    """Logits of the real tokens moved together to the left: another layout than the cache sees."""
    places = np.argsort(1 - MASK, axis=1, kind='stable')
    tokens, mask = np.take_along_axis(TOKENS, places, 1), np.take_along_axis(MASK, places, 1)
    if config.kind == 'decoder':
        logits = model.apply({'params': params}, tokens, mask=mask).logits
    else:
        logits = model.apply(
            {'params': params}, SOURCE, tokens, source_mask=SOURCE_MASK, target_mask=mask
        ).logits
    back = np.empty((3, WIDTH, config.vocab_size))
    np.put_along_axis(back, places[..., None], np.asarray(logits), 1)
    return back


def assert_equal_where_real(cached, whole):
    for row in range(3):
        real = MASK[row].astype(bool)
        np.testing.assert_allclose(cached[row, real], whole[row, real], atol=1e-5 * np.abs(whole).max(), rtol=0)


def is_column_major(leaf):
    return isinstance(leaf, ColumnMajor)


def empty_cache(model):
    if model.config.kind == 'decoder':
        return init_cache(model, 3, CAPACITY)
    return init_cache(model, 3, CAPACITY, SOURCE, SOURCE_MASK)


@pytest.mark.parametrize('kind, scheme, heads, norm', list(grid()))
def test_chunks_through_the_cache_equal_the_full_pass(kind, scheme, heads, norm):
    config = tiny(kind=kind, norm_position=norm, **SCHEMES[scheme] | HEADS[heads])
    model, params = model_and_params(config)
    cache, start, pieces = empty_cache(model), 0, []
    name = 'tokens' if kind == 'decoder' else 'target_tokens'
    for size in CHUNKS:
        part = slice(start, start + size)
        arguments = {name: TOKENS[:, part], name.replace('tokens', 'mask'): MASK[:, part]}
        out = model.apply({'params': params}, cache=cache, **arguments)
        pieces.append(np.asarray(out.logits))
        cache, start = out.cache, start + size
    assert int(cache.filled) == WIDTH and not bool(cache.overflow)
    assert_equal_where_real(np.concatenate(pieces, axis=1), whole_pass(model, params, config))


@pytest.mark.parametrize('choices', [
    dict(kind='decoder', position='rope', num_kv_heads=2, num_layers=3, layer_pattern=('local', 'global'), window=2,
         norm_position='sandwich'),
    dict(position='relative', norm_position='pre', num_decoder_layers=1, remat='full'),
])  # fmt: skip
def test_prefill_and_step_of_scanned_models_equal_the_full_pass(choices):
    config = tiny(layer_stack='scan', **choices)
    model, params = model_and_params(config)
    assert for_decoding(model, params)[0].config.layer_stack == 'unrolled'
    first, cache = prefill(model, params, TOKENS[:, :3], empty_cache(model), MASK[:, :3])
    second, cache = prefill(model, params, TOKENS[:, 3:4], cache, MASK[:, 3:4])
    third, cache = step(model, params, TOKENS[:, 4:5], cache)
    fourth, cache = step(model, params, TOKENS[:, 5:6], cache)
    ours = np.concatenate([first, second, third, fourth], axis=1)
    assert_equal_where_real(ours, whole_pass(model, params, config))
    # The next chunk of three does not fit: refused before the write, by both numbers.
    with pytest.raises(UserError, match='8 slots, of which 6 are filled; 3 more'):
        prefill(model, params, TOKENS[:, :3], cache, MASK[:, :3])
    # Inside jit the flag is set by the ninth token, and stays.
    _, cache = step(model, params, TOKENS[:, :1], cache)
    _, cache = step(model, params, TOKENS[:, :1], cache)
    assert int(cache.filled) == CAPACITY and not bool(cache.overflow)
    inside = jax.jit(lambda cache: step(model, params, TOKENS[:, :1], cache)[1])
    past = inside(cache)
    assert bool(past.overflow)
    assert bool(inside(past.replace(filled=jnp.int32(0))).overflow)


@pytest.mark.parametrize('choices', [
    dict(kind='encoder_decoder', qkv_bias=True, out_bias=True, num_layers=1),
    dict(kind='decoder', ffn='gated_silu', tie_embeddings='none', num_kv_heads=2, num_layers=1),
    dict(kind='decoder', position='rope', d_k=9, d_v=7, norm='rms', latent=LatentConfig(6, None, 4, 'auto'),
         mixture=MixtureConfig(4, 2, shared_experts=1), ffn_bias=False, num_layers=1),
], ids=['encoder_decoder', 'untied', 'latent experts'])  # fmt: skip
def test_a_step_whose_matrices_lie_column_after_column_gives_the_same_logits(choices):
    model, params = model_and_params(tiny(layer_stack='unrolled', **choices))
    _, cache = prefill(model, params, TOKENS[:, :3], empty_cache(model), MASK[:, :3])
    laid_out = for_steps(params, rows=3)
    moved = [leaf for leaf in jax.tree.leaves(laid_out, is_leaf=is_column_major) if is_column_major(leaf)]
    assert len(moved) >= 4 and for_steps(params, rows=1) is params
    want, _ = step(model, params, TOKENS[:, 3:4], cache)
    got, _ = step(model, laid_out, TOKENS[:, 3:4], cache)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_logits_of_the_last_real_token_alone_are_those_of_the_full_prefill():
    model, params = model_and_params(tiny(kind='decoder', num_layers=1))
    every, _ = prefill(model, params, TOKENS[:, :4], empty_cache(model), MASK[:, :4])
    last, _ = prefill(model, params, TOKENS[:, :4], empty_cache(model), MASK[:, :4], last_only=True)
    for row, place in enumerate((1, 3, 3)):
        np.testing.assert_allclose(np.asarray(last)[row, 0], np.asarray(every)[row, place], atol=1e-5)


def test_dynamic_rope_gives_at_each_step_the_full_pass_of_what_was_read():
    """The base moves with the length, past 3 trained positions: earlier keys must be turned anew.

    One layer: the inputs of a second layer's keys were themselves read with the base of their own time.
    """
    scaling = RopeScaling('dynamic', 2.0, 3)
    model, params = model_and_params(tiny(kind='decoder', num_layers=1, position='rope', rope_scaling=scaling))
    cache, pieces = init_cache(model, 3, CAPACITY), []
    for size in (3, 1, 1, 1):
        out = model.apply({'params': params}, TOKENS[:, len(pieces) :][:, :size], cache=cache)
        pieces += list(np.moveaxis(np.asarray(out.logits), 1, 0))
        cache = out.cache
    for length in (3, 6):
        whole = np.asarray(model.apply({'params': params}, TOKENS[:, :length]).logits)[:, -1]
        np.testing.assert_allclose(pieces[length - 1], whole, rtol=0, atol=1e-5 * np.abs(whole).max())
    plain, _ = model_and_params(tiny(kind='decoder', num_layers=1, position='rope'))
    other = np.asarray(plain.apply({'params': params}, TOKENS).logits)[:, -1]
    assert np.abs(other - pieces[-1]).max() > 1e-3


def test_a_window_shows_the_same_keys_in_one_pass_in_chunks_and_step_by_step():
    config = tiny(kind='decoder', num_layers=1, layer_pattern=('local',), window=3, position='none')
    model, params = model_and_params(config)
    tokens = some_tokens(3, 8)
    [weights] = model.apply({'params': params}, tokens, return_attentions=True).attentions
    expected = np.asarray(weights)
    assert (expected[:, 0] > 0).sum(-1)[0].tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    assert np.flatnonzero(expected[0, 0, 7]).tolist() == [5, 6, 7]
    for chunks in ((1,) * 8, (3, 3, 1, 1)):
        cache, start = init_cache(model, 3, 8), 0
        for size in chunks:
            part = tokens[:, start : start + size]
            out = model.apply({'params': params}, part, cache=cache, return_attentions=True)
            np.testing.assert_allclose(
                np.asarray(out.attentions[0]), expected[:, :, start : start + size], atol=1e-6
            )
            cache, start = out.cache, start + size


def test_beams_share_their_sentences_source_and_reorder_their_own_past():
    """Rows 0, 0, 1, 1, 2, 2 belong to sentences 0, 1, 2, whose keys are kept once each."""
    config = tiny(position='rope', num_kv_heads=2, norm_position='pre', num_layers=1)
    model, params = model_and_params(config)

    @jax.jit
    def read(cache, tokens):
        out = model.apply({'params': params}, target_tokens=tokens, cache=cache)
        return out.logits, out.cache

    start, second, third = some_tokens(3, 1, seed=4), some_tokens(6, 1, seed=5), some_tokens(6, 1, seed=6)
    _, cache = read(init_cache(model, 3, CAPACITY, SOURCE, SOURCE_MASK), start)
    assert cache.source is None
    _, cache = read(gather_beams(cache, jnp.array([0, 0, 1, 1, 2, 2])), second)
    order = np.array([1, 0, 3, 3, 4, 5])
    logits, cache = read(gather_beams(cache, jnp.asarray(order)), third)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache.cross)} == {3}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache.mixers)} == {6}
    written = np.concatenate([np.repeat(start, 2, axis=0), second[order], third], axis=1)
    rows = np.arange(6) // 2
    whole = jax.jit(model.apply)({'params': params}, SOURCE[rows], written, source_mask=SOURCE_MASK[rows]).logits
    np.testing.assert_allclose(logits[:, 0], whole[:, -1], rtol=0, atol=1e-5 * np.abs(whole).max())
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


def test_kinds_without_a_cache_or_a_source_are_refused():
    encoder, _ = model_and_params(tiny(kind='encoder'))
    with pytest.raises(UserError, match='an encoder has no cache'):
        init_cache(encoder, 1, 4)
    for kind, source, message in (('decoder', SOURCE, 'takes no source'), ('encoder_decoder', None, 'needs a source')):
        model, _ = model_and_params(tiny(kind=kind))
        with pytest.raises(UserError, match=message):
            init_cache(model, 3, 4, source)
