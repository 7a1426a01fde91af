"""Caches which grow with the answer, and the largest numbers in two stages, each against the plain program."""

from __future__ import annotations

import itertools

import chains
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.decoding import DecodeConfig, generate, stream
from transformer_jax.decoding.cache_api import init_cache, numbers_per_slot
from transformer_jax.decoding.growth import first_room, growing_loop, rooms
from transformer_jax.decoding.largest import largest
from transformer_jax.decoding.processors import Prompt
from transformer_jax.decoding.sampling import sample_loop
from transformer_jax.models import build, init_params
from transformer_jax.subconfigs import LatentConfig


@pytest.mark.parametrize('first', [16, 64])
@pytest.mark.parametrize('capacity', [1, 31, 64, 96, 127, 128, 160, 1000, 4096])
def test_stages_double_up_to_the_capacity(capacity, first):
    stages = rooms(capacity, first)
    assert stages[-1] == capacity and stages[0] < 2 * first
    pairs = itertools.pairwise(stages)
    assert all(first <= before and after in (2 * before, 2 * before - 1) for before, after in pairs)


@pytest.mark.parametrize('numbers, room', [(1, 64), (39, 64), (40, 32), (78, 32), (79, 16), (10_000, 16)])
def test_the_first_stage_is_the_shorter_the_larger_the_cache_is_beside_the_model(numbers, room):
    """10,000 parameters: a quarter is 2,500 numbers, which 64 tokens of 39 numbers reach not, and of 40 do."""
    assert first_room(numbers, 10_000) == room


@pytest.mark.parametrize('choices', [
    dict(kind='encoder_decoder', d_k=6, d_v=10),
    dict(kind='decoder', num_kv_heads=1, num_layers=3),
    dict(kind='decoder', position='rope', d_k=9, d_v=7, latent=LatentConfig(6, None, 4, 'auto')),
], ids=['widths', 'shared keys', 'latent'])  # fmt: skip
def test_numbers_per_slot_are_those_which_a_cache_holds(choices):
    config = ModelConfig(**dict(vocab_size=11, d_model=16, d_ff=16, num_layers=2, num_heads=2) | choices)
    source = jnp.ones((3, 4), jnp.int32) if config.kind == 'encoder_decoder' else None
    cache = init_cache(build(config), 3, 5, source)
    assert sum(leaf.size for leaf in jax.tree.leaves(cache.mixers)) == 3 * 5 * numbers_per_slot(config)


def test_a_loop_gives_its_cache_room_before_it_is_needed():
    tables = jnp.asarray(chains.Chains(3, 7).tables)
    logits, cache = chains.begin(tables)
    prompt = Prompt(**chains.prompts([300, 300, 300]))
    step_fn = chains.step_fn(tables)

    def noting(tokens, cache):
        """The chain's step, which also writes the token it reads to the first free slot of its row, if there is one."""
        logits, own = step_fn(tokens, cache['own'])
        slots = cache['slots'].at[:, cache['read']].set(tokens[:, 0], mode='drop')
        return logits, dict(own=own, slots=slots, read=cache['read'] + 1)

    def grow(cache, room):
        return cache | dict(slots=jnp.pad(cache['slots'], [(0, 0), (0, room - 1 - cache['slots'].shape[1])]))

    whole = dict(own=cache, slots=jnp.zeros((len(logits), rooms(300)[0] - 1), jnp.int32), read=0)
    config = DecodeConfig(eos_ids=())
    state = sample_loop(noting, logits, whole, prompt, config, 300, loop=growing_loop(rooms(300), grow))
    plain = sample_loop(step_fn, logits, cache, prompt, config, 300)
    np.testing.assert_array_equal(state.tokens_RT, plain.tokens_RT)
    np.testing.assert_array_equal(state.cache['slots'], plain.tokens_RT[:, :-1])


@pytest.mark.parametrize('beams', [1, 2])
def test_answers_longer_than_a_stage_are_those_of_the_training_forward(beams):
    config = ModelConfig(
        kind='decoder', vocab_size=11, d_model=16, d_ff=16, num_layers=1, num_heads=2, position='rope', dropout=0.0
    )
    model = build(config)
    params = jax.tree.map(lambda leaf: 3 * leaf, init_params(model, jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 5))
    search = DecodeConfig(max_new_tokens=150, eos_ids=(), beam_size=beams, return_log_probs=True)
    found = generate(model, params, tokens, config=search)
    answers = found.tokens[:, 0]
    logits = model.apply({'params': params}, np.concatenate([tokens, answers], axis=1)).logits[:, 4:-1]
    wanted = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), answers[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(found.log_probs[:, 0], wanted, rtol=0, atol=1e-4)
    if beams == 1:
        np.testing.assert_array_equal(answers, np.argmax(logits, axis=2))
        np.testing.assert_array_equal(answers, np.stack(list(stream(model, params, tokens, config=search)), axis=1))
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
        again = np.stack(list(stream(model, params, tokens, config=search)), axis=1)
        assert '/jax/core/compile/backend_compile_duration' not in compiled
        np.testing.assert_array_equal(answers, again)


@pytest.mark.parametrize('size', [40, 640, 1000, 32001])
@pytest.mark.parametrize('kind', ['distinct', 'few values', 'mostly -inf'])
def test_two_stages_find_what_sorting_finds(size, kind):
    rng = np.random.default_rng(size)
    x = {
        'distinct': rng.normal(size=(3, size)),
        'few values': rng.integers(0, 4, (3, size)).astype(float),
        'mostly -inf': np.where(rng.random((3, size)) < 3 / size, 1.0, -np.inf),
    }[kind].astype(np.float32)
    values, index = jax.jit(largest, static_argnums=1)(x, 8)
    wanted = np.argsort(-x, axis=1, kind='stable')[:, :8]
    np.testing.assert_array_equal(index, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, axis=1))
