"""Greedy search and sampling, on chains."""

from __future__ import annotations

import functools

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.processors import Prompt
from transformer_jax.decoding.sampling import Draws, begin, choose_next, sample_loop

EOS, CAPACITY = 3, 8
CHAINS = chains.Chains(batch=6, vocabulary=7, seed=3)
LIMITS = [8, 1, 5, 8, 2, 8]


@functools.partial(jax.jit, static_argnames=('config', 'capacity'))
def run(tables, prompt, draws, config, capacity):
    logits, cache = chains.begin(tables)
    return sample_loop(chains.step_fn(tables), logits, cache, prompt, config, capacity, draws)


def draw(model, limits, temperature, seed=0, capacity=CAPACITY, **choices):
    rows = len(limits)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(rows))
    draws = Draws(keys, jnp.broadcast_to(jnp.float32(temperature), rows))
    config = DecodeConfig(eos_ids=(EOS,), sample=True, **choices)
    return jax.tree.map(np.asarray, run(model.tables, Prompt(**chains.prompts(limits)), draws, config, capacity))


def greedy(model, limits, **choices):
    config = DecodeConfig(eos_ids=(EOS,), **choices)
    return jax.tree.map(np.asarray, run(model.tables, Prompt(**chains.prompts(limits)), None, config, CAPACITY))


def test_greedy_is_the_textbooks_and_padded_after_its_end():
    got = greedy(CHAINS, LIMITS, return_log_probs=True)
    for row, limit in enumerate(LIMITS):
        want = chains.greedy(functools.partial(CHAINS.log_probs, row), (EOS,), limit)
        assert got.tokens_RT[row].tolist() == [*want, *[0] * (CAPACITY - len(want))] and got.lengths_R[row] == len(want)
        values = [CHAINS.log_probs(row, want[:i])[token] for i, token in enumerate(want)]
        np.testing.assert_allclose(got.log_probs_RT[row], values + [0] * (CAPACITY - len(want)), atol=1e-5)
        np.testing.assert_allclose(got.sums_R[row], sum(values), atol=1e-5)
    assert len(set(got.lengths_R.tolist())) > 2


def test_the_loop_stops_when_every_row_has_ended():
    ending = chains.Chains(batch=6, vocabulary=7, seed=3)
    ending.tables[:, 2:, EOS] += 20
    got = greedy(ending, [8] * 6)
    assert got.generated == got.lengths_R.max() < CAPACITY and got.done_R.all()


def test_temperature_zero_is_greedy_for_its_row_only():
    want = greedy(CHAINS, LIMITS)
    zero = draw(CHAINS, LIMITS, 0.0)
    np.testing.assert_array_equal(zero.tokens_RT, want.tokens_RT)
    np.testing.assert_allclose(zero.sums_R, want.sums_R, atol=1e-6)
    cold = draw(CHAINS, LIMITS, 1e-4)
    np.testing.assert_array_equal(cold.tokens_RT, want.tokens_RT)
    mixed, warm = draw(CHAINS, LIMITS, [0, 3, 0, 3, 0, 3]), draw(CHAINS, LIMITS, 3.0)
    np.testing.assert_array_equal(mixed.tokens_RT[::2], want.tokens_RT[::2])
    np.testing.assert_array_equal(mixed.tokens_RT[1::2], warm.tokens_RT[1::2])
    assert (warm.tokens_RT != want.tokens_RT).any()


def test_a_draw_does_not_depend_on_other_rows():
    together = draw(CHAINS, LIMITS, 1.0)
    fewer = chains.Chains(batch=2, vocabulary=7)
    fewer.tables = CHAINS.tables[:2]
    alone = draw(fewer, LIMITS[:2], 1.0)
    np.testing.assert_array_equal(together.tokens_RT[:2], alone.tokens_RT)
    np.testing.assert_array_equal(together.lengths_R[:2], alone.lengths_R)


@functools.partial(jax.jit, static_argnames='config')
def draw_one(logits_RV, key, config):
    """One token and its processed log-probability for every row."""
    rows = logits_RV.shape[0]
    prompt = jax.tree.map(jnp.asarray, Prompt(**chains.prompts([1] * rows)))
    draws = Draws(jax.random.split(key, rows), jnp.ones(rows))
    state = choose_next(begin(None, prompt, config, 1), logits_RV, prompt, config, draws)
    return state.tokens_RT[:, 0], state.sums_R


@pytest.mark.parametrize(
    'choices, want',
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        (dict(top_k=3), [4 / 9, 3 / 9, 2 / 9, 0]),
        (dict(top_p=0.7), [4 / 7, 3 / 7, 0, 0]),
        (dict(min_p=0.45), [4 / 9, 3 / 9, 2 / 9, 0]),
    ],
)
def test_draws_follow_the_distribution(choices, want):
    """4000 rows with equal logits: the counts pass a chi-square test, so rows do not share their draw either."""
    logits_RV = np.tile(np.log(np.float32([0.4, 0.3, 0.2, 0.1])), (4000, 1))
    tokens_R, sums_R = draw_one(logits_RV, jax.random.key(5), DecodeConfig(sample=True, **choices))
    counts, kept = np.bincount(tokens_R, minlength=4), np.array(want) > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], 4000 * np.array(want)[kept]).pvalue > 1e-3
    np.testing.assert_allclose(sums_R, np.log(np.array(want)[np.asarray(tokens_R)]), atol=1e-5)


def test_steps_of_a_row_are_drawn_independently():
    model = chains.Chains(batch=2000, vocabulary=3)
    model.tables[:] = 0
    got = draw(model, [2] * 2000, 1.0, seed=6, capacity=2)
    pairs = np.bincount(got.tokens_RT[:, 0] * 3 + got.tokens_RT[:, 1], minlength=9)
    assert stats.chisquare(pairs).pvalue > 1e-3
