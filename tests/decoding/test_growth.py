"""Caches which grow with the answer, and the largest numbers in two stages, each against the plain program."""

from __future__ import annotations

import dataclasses
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
from transformer_jax.decoding.growth import first_room, growing_loop, rooms, slots
from transformer_jax.decoding.largest import largest
from transformer_jax.decoding.processors import Prompt
from transformer_jax.decoding.sampling import sample_loop
from transformer_jax.layers.cache import Cache
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


@pytest.mark.parametrize(
    'prompt, room, beams, count', [(1, 16, 4, 64), (128, 128, 1, 256), (7, 1, 3, 16), (5, 4, 4, 32)]
)
def test_slots_are_those_of_prompt_and_answers_but_their_last_tokens(prompt, room, beams, count):
    """1 + 4 x 15 = 61, 128 + 127 = 255, 7 and 5 + 4 x 3 = 17, each up to the next multiple of 16."""
    assert slots(prompt, room, beams) == count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Notes:
    """The cache of a chain which also writes down each token that it reads, if it has room for it."""

    own: jax.Array
    notes: jax.Array
    filled: jax.Array

    @property
    def capacity(self):
        return self.notes.shape[1]

    def grow(self, capacity):
        return dataclasses.replace(self, notes=jnp.pad(self.notes, [(0, 0), (0, capacity - self.capacity)]))


def test_a_loop_gives_its_cache_room_before_it_is_needed():
    tables = jnp.asarray(chains.Chains(3, 7).tables)
    logits, cache = chains.begin(tables)
    prompt = Prompt(**chains.prompts([300, 300, 300]))
    step_fn = chains.step_fn(tables)

    def noting(tokens, cache):
        logits, own = step_fn(tokens, cache.own)
        notes = cache.notes.at[:, cache.filled].set(tokens[:, 0], mode='drop')
        return logits, Notes(own, notes, cache.filled + 1)

    empty = Notes(cache, jnp.zeros((len(logits), 0), jnp.int32), jnp.int32(0))
    config = DecodeConfig(eos_ids=())
    state = sample_loop(noting, logits, empty, prompt, config, 300, loop=growing_loop(rooms(300), 0))
    plain = sample_loop(step_fn, logits, cache, prompt, config, 300)
    np.testing.assert_array_equal(state.tokens_RT, plain.tokens_RT)
    np.testing.assert_array_equal(state.cache.notes[:, :299], plain.tokens_RT[:, :-1])


GROUPS = dict(beam_groups=2, diversity_penalty=0.3, early_stopping='first')


@pytest.mark.parametrize(
    'choices, sentences, scale', [({}, 3, 3), (GROUPS | dict(eos_ids=(3,)), 15, 1)], ids=['beams', 'groups']
)
def test_a_search_frees_what_no_beam_needs_and_answers_the_same(monkeypatch, choices, sentences, scale):
    config = ModelConfig(
        kind='decoder', vocab_size=11, d_model=16, d_ff=16, num_layers=1, num_heads=2, position='rope', dropout=0.0,
        tie_embeddings='none',
    )  # fmt: skip
    model = build(config)
    params = jax.tree.map(lambda leaf: scale * leaf, init_params(model, jax.random.key(0)))
    tokens, mask = np.random.default_rng(0).integers(0, 11, (sentences, 5)), np.ones((sentences, 5))
    mask[0, :2] = 0
    config = DecodeConfig(**dict(max_new_tokens=200, eos_ids=(), beam_size=4) | choices)
    packs, partly, pack = [], [], Cache.pack

    def noting(cache, going_on):
        packed = pack(cache, going_on)
        jax.debug.callback(lambda *filled: packs.append((cache.capacity, *filled)), cache.filled, packed.filled)
        groups = going_on.reshape(-1, 2, 2).all(axis=2)
        jax.debug.callback(partly.append, (groups[:, 0] != groups[:, 1]).any())
        return packed

    monkeypatch.setattr(Cache, 'pack', noting)
    found = generate(model, params, tokens, mask=mask, config=config)
    jax.effects_barrier()
    # A stage is packed as it begins, and again when it is full; then it has much room at least once.
    again = [(before, after) for (size, *_), (same, before, after) in itertools.pairwise(packs) if size == same]
    assert again and min(after / before for before, after in again) < 0.6
    assert np.any(partly) == ('beam_groups' in choices)
    monkeypatch.setitem(generate.__globals__, 'rooms', lambda capacity, first: [capacity])
    generate.__globals__['search'].clear_cache()
    packs.clear()
    plain = generate(model, params, tokens, mask=mask, config=config)
    jax.effects_barrier()
    generate.__globals__['search'].clear_cache()
    assert not packs
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_allclose(found.scores, plain.scores, rtol=1e-5)


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
@pytest.mark.parametrize('kind', ['distinct', 'few values', 'mostly -inf', '-inf'])
@pytest.mark.parametrize('count', [1, 8])
def test_two_stages_find_what_sorting_finds(size, kind, count):
    rng = np.random.default_rng(size)
    x = {
        'distinct': rng.normal(size=(3, size)),
        'few values': rng.integers(0, 4, (3, size)).astype(float),
        '-inf': np.full((3, size), -np.inf),
        'mostly -inf': np.where(rng.random((3, size)) < 3 / size, 1.0, -np.inf),
    }[kind].astype(np.float32)
    values, index = jax.jit(largest, static_argnums=1)(x, count)
    wanted = np.argsort(-x, axis=1, kind='stable')[:, :count]
    np.testing.assert_array_equal(index, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, axis=1))
