"""Score processors against written-out values, and against transformers' own classes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding import processors
from transformer_jax.decoding.processors import History, Prompt

INF = np.inf


def history(rows, pad=0):
    """Left-padded rows, with one free slot at the end which is not text."""
    width = max(map(len, rows))
    tokens = np.array([[pad] * (width - len(row)) + row + [pad] for row in rows], np.int32)
    return History(jnp.asarray(tokens), jnp.array([width - len(row) for row in rows]), jnp.int32(width))


def kept(logits):
    return [set(np.flatnonzero(row > -INF).tolist()) for row in np.asarray(logits)]


def test_repetition_penalty_lowers_and_does_not_count_padding():
    scores = jnp.array([[2.0, -1.0, 0.5]] * 2)
    got = processors.repetition_penalty(scores, history([[0, 1, 1], [0, 1]], pad=2), 2.0)
    np.testing.assert_allclose(got, [[1.0, -2.0, 0.5]] * 2)
    np.testing.assert_array_equal(processors.repetition_penalty(scores, history([[0, 1, 1], [0, 1]]), 1.0), scores)


@pytest.mark.parametrize('size, banned', [(1, {1, 2, 3, 4}), (2, {3, 4}), (3, {4}), (4, set()), (7, set())])
def test_no_ngram_is_completed_twice(size, banned):
    """After 2 the text went on with 4 and 3, after 1 2 with 4; padding is no text, nor a row shorter than an n-gram."""
    got = processors.no_repeat_ngram(jnp.zeros((2, 6)), history([[1, 2, 4, 2, 3, 1, 4, 1, 2], [4]]), size)
    everything = set(range(6))
    assert kept(got) == [everything - banned, everything - ({4} if size == 1 else set())]


def test_forbidden_sequences_ban_their_last_id_only():
    rows = history([[4, 2, 3], [3]], pad=2)
    got = processors.forbid(jnp.zeros((2, 6)), rows, (5, (2, 3, 0), (3, 1), (2, 4), (1, 2, 3, 4, 5)))
    assert kept(got) == [{2, 3, 4}, {0, 2, 3, 4}]


def test_min_new_tokens_and_forced_tokens():
    zeros = jnp.zeros((2, 4))
    assert kept(processors.min_new_tokens(zeros, jnp.int32(1), 2, (1, 3))) == [{0, 2}] * 2
    assert kept(processors.min_new_tokens(zeros, jnp.int32(2), 2, (1, 3))) == [{0, 1, 2, 3}] * 2
    forced = processors.force(zeros + 3, jnp.array([True, False]), 2)
    np.testing.assert_array_equal(forced, [[-INF, -INF, 0, -INF], [3] * 4])


@pytest.mark.parametrize(
    'probs, p, want',
    [
        ([0.3, 0.1, 0.1, 0.5], 0.8, {0, 3}),
        ([0.5, 0.41, 0.09], 0.9, {0, 1}),
        ([0.5, 0.35, 0.1, 0.05], 0.9, {0, 1, 2}),
        ([0.25] * 4, 0.5, {0, 1}),
        ([0.1, 0.2, 0.7], 1.0, {0, 1, 2}),
        ([0.1, 0.2, 0.7], 1e-9, {2}),
    ],
)
def test_top_p_keeps_the_smallest_set_which_reaches_p(probs, p, want):
    assert kept(processors.top_p(jnp.log(jnp.array([probs])), p)) == [want]


def test_top_k_of_the_vocabulary_or_more_keeps_all():
    logits = jnp.array([[1.0, 3.0, 2.0]])
    assert kept(processors.top_k(logits, 2)) == [{1, 2}]
    assert kept(processors.top_k(logits, 3)) == kept(processors.top_k(logits, 99)) == [{0, 1, 2}]


def test_temperature_acts_before_the_filters_and_zero_leaves_its_row():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]] * 2))
    config = DecodeConfig(sample=True, top_p=0.75)
    assert kept(processors.warp(logits, jnp.array([1.0, 0.1]), config)) == [{0, 1}, {0}]
    assert kept(processors.warp(logits, jnp.array([0.0, 9.0]), config)) == [{0, 1, 2}] * 2


def torch_processors(config, limit):
    transformers = pytest.importorskip('transformers')
    lists = transformers.LogitsProcessorList
    singles = [[entry] if isinstance(entry, int) else list(entry) for entry in config.forbidden_tokens]
    return lists(
        [
            transformers.RepetitionPenaltyLogitsProcessor(config.repetition_penalty),
            transformers.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size),
            transformers.NoBadWordsLogitsProcessor(singles, list(config.eos_ids)),
            transformers.MinNewTokensLengthLogitsProcessor(3, config.min_new_tokens, list(config.eos_ids)),
            transformers.ForcedEOSTokenLogitsProcessor(3 + limit, config.forced_last_token),
        ]
    ), lists(
        [
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(config.top_k),
            transformers.TopPLogitsWarper(config.top_p),
            transformers.MinPLogitsWarper(config.min_p),
        ]
    )


@pytest.mark.parity
def test_order_and_values_are_those_of_transformers():
    torch = pytest.importorskip('torch')
    config = DecodeConfig(
        repetition_penalty=1.4,
        no_repeat_ngram_size=2,
        forbidden_tokens=(3, (1, 2), (4, 4)),
        min_new_tokens=2,
        forced_last_token=9,
        eos_ids=(9,),
        sample=True,
        top_k=7,
        top_p=0.8,
        min_p=0.08,
    )
    rng = np.random.default_rng(0)
    before, after = torch_processors(config, limit=6)
    process = jax.jit(processors.process, static_argnames='config')
    for generated in range(6):
        text = rng.integers(0, 6, (40, 3 + generated))
        logits = (rng.normal(size=(40, 10)) * 2).astype(np.float32)
        prompt = Prompt(jnp.asarray(text[:, :3]), jnp.zeros(40, jnp.int32), jnp.full(40, 6))
        answer = np.concatenate([text[:, 3:], rng.integers(0, 6, (40, 6 - generated))], axis=1)
        got = process(logits, prompt, answer, generated, config=config)
        want = before(torch.tensor(text), torch.tensor(logits))
        np.testing.assert_allclose(got, want, rtol=1e-6)
        np.testing.assert_allclose(
            processors.warp(got, jnp.full(40, 0.7), config), after(torch.tensor(text), want), rtol=1e-6
        )
