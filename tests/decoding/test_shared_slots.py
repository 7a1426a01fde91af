"""Beams which share an entry of the cache and take over sets of slots, against rows whose slots are moved."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import model_and_params, some_tokens, tiny

from transformer_jax.decoding import gather_beams, init_cache, prefill, step
from transformer_jax.subconfigs import LatentConfig, RopeScaling

SENTENCES, BEAMS, PROMPT = 2, 3, 3
MASK = np.array([[0, 1, 1], [1, 1, 1]])
# The first step's rows come from the prompt; a row dies and another has two children; all come from the last one.
ORDERS = ([0, 0, 0, 1, 1, 1], [1, 0, 1, 4, 4, 3], [2, 2, 2, 3, 5, 4], [0, 2, 1, 3, 4, 5])
MODELS = {
    'grouped heads, rope, window': dict(
        position='rope', num_kv_heads=2, layer_pattern=('local', 'global'), window=2, num_layers=2
    ),
    'dynamic rope': dict(position='rope', rope_scaling=RopeScaling('dynamic', 2.0, 3), num_layers=1),
    'relative': dict(position='relative', relative_buckets=8, relative_max_distance=6, num_layers=2),
    'alibi': dict(position='alibi', num_kv_heads=1, num_layers=1),
    'latent': dict(position='rope', d_k=9, d_v=7, norm='rms', latent=LatentConfig(6, None, 4, 'auto'), num_layers=1),
    'int8': dict(position='learned', cache_dtype='int8', num_layers=1),
    'encoder_decoder': dict(kind='encoder_decoder', num_layers=1),
}


@functools.partial(jax.jit, static_argnames=('model', 'beams', 'change'))
def logits_after(params, model, beams, change=lambda cache, room: cache.grow(max(room, cache.capacity))):
    """Logits of four steps after a padded prompt, and the cache, which `change` gives room before each of them."""
    source = some_tokens(SENTENCES, 5, seed=1) if model.config.kind == 'encoder_decoder' else None
    cache = init_cache(model, SENTENCES, PROMPT, source, None, beams)
    _, cache = prefill(model, params, some_tokens(SENTENCES, PROMPT), cache, MASK)
    every = []
    for number, order in enumerate(ORDERS):
        tokens = some_tokens(SENTENCES * BEAMS, 1, seed=2 + number)
        cache = gather_beams(cache, jnp.array(order))
        logits, cache = step(model, params, tokens, change(cache, PROMPT + beams * (number + 1)))
        every.append(logits)
    return jnp.concatenate(every, axis=1), cache


def whole_room(cache, room):
    """Room for all steps from the beginning."""
    del room
    return cache.grow(PROMPT + cache.beams * len(ORDERS))


def packed(cache, room):
    """Room for all steps, most of it free again and again."""
    return whole_room(cache, room).pack()


@pytest.mark.parametrize('name', MODELS)
def test_beams_which_share_slots_read_what_beams_which_move_them_read(name):
    model, params = model_and_params(tiny(**{'kind': 'decoder', **MODELS[name]}))
    shared, cache = logits_after(params, model, BEAMS)
    moved, _ = logits_after(params, model, 1)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache.mixers)} == {SENTENCES}
    np.testing.assert_allclose(shared, moved, rtol=0, atol=1e-5 * np.abs(moved).max())
    assert np.abs(shared[0] - shared[1]).max() > 1e-3


# The base of dynamic rope is that of the longest row of an entry.
@pytest.mark.parametrize('name', sorted(MODELS.keys() - {'dynamic rope'}))
def test_beams_may_read_several_tokens_at_once_and_not_equally_many(name):
    model, params = model_and_params(tiny(**{'kind': 'decoder', **MODELS[name]}))
    tokens, mask = some_tokens(SENTENCES * BEAMS, 3, seed=9), np.arange(3) < np.array([[3], [1], [2], [2], [3], [0]])

    @functools.partial(jax.jit, static_argnums=1)
    def after(params, beams):
        _, cache = logits_after(params, model, beams)
        cache = cache.grow(cache.capacity + 4 * beams)
        logits, cache = prefill(model, params, tokens, cache, mask)
        return logits, step(model, params, tokens[:, :1], gather_beams(cache, jnp.array([1, 0, 0, 5, 4, 3])))[0]

    (shared, shared_next), (moved, moved_next) = after(params, BEAMS), after(params, 1)
    np.testing.assert_allclose(shared[mask], moved[mask], rtol=0, atol=1e-5 * np.abs(moved[mask]).max())
    np.testing.assert_allclose(shared_next, moved_next, rtol=0, atol=1e-5 * np.abs(moved_next).max())


@pytest.mark.parametrize('name', ['grouped heads, rope, window', 'latent', 'int8', 'encoder_decoder'])
@pytest.mark.parametrize('beams', [1, BEAMS])
def test_a_cache_which_grows_is_read_as_one_which_had_the_room(name, beams):
    model, params = model_and_params(tiny(**{'kind': 'decoder', **MODELS[name]}))
    grown, cache = logits_after(params, model, beams)
    wanted, plain = logits_after(params, model, beams, whole_room)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, plain)
    np.testing.assert_allclose(grown, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('beams', [1, BEAMS])
def test_a_packed_cache_is_read_as_one_which_keeps_what_died(name, beams):
    """The last step finds in sentence 1 its prompt's 3 tokens, two of the first step's and all three of the others'."""
    model, params = model_and_params(tiny(**{'kind': 'decoder', **MODELS[name]}))
    got, cache = logits_after(params, model, beams, packed)
    wanted, plain = logits_after(params, model, beams, whole_room)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert (cache.filled, plain.filled) == ((3 + 2 + 3 + 3 + 3, 3 + 4 * 3) if beams > 1 else (7, 7))


def test_rows_which_are_done_lose_their_slots():
    model, params = model_and_params(tiny(kind='decoder', **MODELS['grouped heads, rope, window']))
    _, cache = logits_after(params, model, BEAMS, whole_room)
    order, tokens = jnp.array([0, 1, 2, 3, 3, 4]), some_tokens(6, 1, seed=7)
    cache = gather_beams(cache.grow(cache.capacity + 2 * BEAMS), order)
    going_on = jnp.array([False] * 3 + [True] * 3)
    packed = cache.pack(going_on)
    past = np.asarray(cache.valid)[3:].any(axis=0)
    assert cache.needed(going_on) == packed.filled == past.sum() < PROMPT + BEAMS * len(ORDERS)
    assert packed.valid[:3].sum() == 0
    got, _ = step(model, params, tokens, packed)
    wanted, _ = step(model, params, tokens, cache)
    np.testing.assert_allclose(got[3:], wanted[3:], rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('beams', [1, BEAMS])
def test_the_cache_takes_the_memory_of_its_docstring(name, beams):
    config = tiny(**{'kind': 'decoder', **MODELS[name]})
    source = some_tokens(SENTENCES, 5, seed=1) if config.kind == 'encoder_decoder' else None
    model, params = model_and_params(config)
    cache = jax.eval_shape(
        lambda params: prefill(
            model, params, some_tokens(SENTENCES, 1), init_cache(model, SENTENCES, 7, source, None, beams)
        )[1],
        params,
    )
    slots, L, K = SENTENCES * 7, config.num_layers, config.kv_heads
    numbers = slots * L * K * (config.key_dim + config.value_dim)
    if name == 'encoder_decoder':
        numbers += SENTENCES * 5 * L * K * (config.key_dim + config.value_dim)
    wanted = 4 * numbers
    if name == 'latent':
        wanted = 4 * slots * L * (config.latent.kv_rank + config.latent.rotary_dim)
    if name == 'int8':
        wanted = numbers + slots * L * K * 2 * 2
    held = (*cache.mixers, *cache.cross)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held)) == wanted
