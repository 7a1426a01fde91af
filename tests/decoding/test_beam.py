"""Beam search against enumeration and a textbook beam search with Python lists."""

from __future__ import annotations

import functools
import math

import chains
import jax
import numpy as np
import pytest

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.beam import beam_loop, best_attainable, length_penalty
from transformer_jax.decoding.processors import Prompt
from transformer_jax.decoding.sampling import sample_loop

EOS = 3
LIMIT = 4


@functools.partial(jax.jit, static_argnames=('config', 'capacity'))
def run(tables, prompt, alpha, config, capacity):
    logits, cache = chains.begin(tables)
    return beam_loop(chains.step_fn(tables), chains.gather, logits, cache, prompt, alpha, config, capacity)[0]


def search(model, limits, capacity=LIMIT, length_penalty_alpha=0.6, **choices):
    """The hypotheses of `model`'s chains, as numpy."""
    config = DecodeConfig(**{'eos_ids': (EOS,), 'num_return': choices.get('beam_size', 1), **choices})
    found = run(model.tables, Prompt(**chains.prompts(limits)), length_penalty_alpha, config, capacity)
    return jax.tree.map(np.asarray, found)


def answers(found, row):
    """[(score, tokens)] of one row, empty places left out."""
    return [
        (float(score), tuple(tokens[:length].tolist()))
        for score, tokens, length in zip(
            found.scores_BK[row], found.tokens_BKT[row], found.lengths_BK[row], strict=True
        )
        if length
    ]


def assert_same(got, want):
    np.testing.assert_allclose([score for score, _ in got], [score for score, _ in want], atol=2e-5, rtol=0)
    assert [tokens for _, tokens in got] == [tokens for _, tokens in want]


@functools.cache
def enumerated(row, alpha, kind):
    return chains.enumerate_all(functools.partial(CHAINS.log_probs, row), (EOS,), LIMIT, alpha, kind)


CHAINS = chains.Chains(batch=30, vocabulary=4, seed=1)
ALPHAS = (0.0, 0.6, 1.0, 2.0, -0.5)


@pytest.mark.parametrize('kind', ['gnmt', 'length'])
def test_a_beam_as_wide_as_the_prefixes_finds_what_enumeration_finds(kind):
    wide = (4 - 1) ** (LIMIT - 1)
    for alpha in ALPHAS:
        found = search(
            CHAINS, [LIMIT] * 30, beam_size=wide, length_penalty=kind, length_penalty_alpha=alpha, num_return=8
        )
        for row in range(30):
            assert_same(answers(found, row), enumerated(row, alpha, kind)[:8])


@pytest.mark.parametrize(
    'beams, kind, early_stopping',
    [
        (1, 'gnmt', 'bound'),
        (1, 'length', 'first'),
        (2, 'length', 'first'),
        (2, 'length', 'heuristic'),
        (2, 'length', 'bound'),
        (3, 'gnmt', 'bound'),
        (5, 'length', 'bound'),
    ],
)
def test_any_beam_is_the_textbooks(beams, kind, early_stopping):
    for alpha in ALPHAS:
        found = search(
            CHAINS,
            [LIMIT] * 30,
            beam_size=beams,
            length_penalty=kind,
            length_penalty_alpha=alpha,
            early_stopping=early_stopping,
        )
        for row in range(30):
            got, every = answers(found, row), enumerated(row, alpha, kind)
            assert_same(
                got,
                chains.textbook_beams(
                    functools.partial(CHAINS.log_probs, row), (EOS,), LIMIT, beams, alpha, kind, early_stopping
                ),
            )
            true_scores = {tokens: score for score, tokens in every}
            np.testing.assert_allclose(
                [score for score, _ in got], [true_scores[tokens] for _, tokens in got], atol=2e-5
            )
            assert len({tokens for _, tokens in got}) == len(got)
            assert got[0][0] <= every[0][0] + 2e-5


def test_early_stopping_modes_differ():
    found = [
        search(
            CHAINS, [LIMIT] * 30, beam_size=2, length_penalty='length', length_penalty_alpha=2.0, early_stopping=mode
        ).scores_BK
        for mode in ('first', 'heuristic', 'bound')
    ]
    assert (found[0] <= found[1] + 1e-6).all() and (found[1] <= found[2] + 1e-6).all()
    assert not np.allclose(found[0], found[1]) and not np.allclose(found[1], found[2])


def test_several_end_ids_and_limits_per_row_are_the_textbooks():
    model = chains.Chains(batch=12, vocabulary=9, seed=2)
    limits = [1 + row % 7 for row in range(12)]
    found = search(model, limits, capacity=16, beam_size=3, eos_ids=(2, 5, 7))
    for row, limit in enumerate(limits):
        assert_same(
            answers(found, row),
            chains.textbook_beams(functools.partial(model.log_probs, row), (2, 5, 7), limit, 3, 0.6, 'gnmt', 'bound'),
        )
        assert found.lengths_BK[row].max() <= limit


def test_groups_are_the_textbooks_and_diversity_separates_them():
    model = chains.Chains(batch=12, vocabulary=9, seed=3)
    firsts = {}
    for diversity in (0.0, 1.5):
        found = search(model, [5] * 12, capacity=5, beam_size=6, beam_groups=3, diversity_penalty=diversity)
        firsts[diversity] = found.tokens_BKT[:, :, 0]
        for row in range(12):
            assert_same(
                answers(found, row),
                chains.textbook_beams(
                    functools.partial(model.log_probs, row), (EOS,), 5, 6, 0.6, 'gnmt', 'bound', 3, diversity
                ),
            )
    distinct = {diversity: sum(len(set(row)) for row in tokens.tolist()) for diversity, tokens in firsts.items()}
    assert distinct[1.5] > distinct[0.0]


def test_a_vocabulary_below_twice_the_beam_fills_what_exists():
    model = chains.Chains(batch=5, vocabulary=2, seed=4)
    found = search(model, [2] * 5, beam_size=8, eos_ids=(1,))
    for row in range(5):
        every = chains.enumerate_all(functools.partial(model.log_probs, row), (1,), 2, 0.6, 'gnmt')
        assert len(every) == 3
        assert_same(answers(found, row), every)
    assert (found.scores_BK[:, 3:] == -np.inf).all() and (found.tokens_BKT[:, 3:] == 0).all()


def test_the_first_ending_is_not_the_best():
    """joeynmt#148: first step .35 .25 .40 (end), then .05 .05 .90: [end] ends first, [0, end] is better."""
    model = chains.Chains(batch=30, vocabulary=4)
    model.tables[:] = np.log([0.05, 0.05, 1e-30, 0.90])
    model.tables[:, 1] = np.log([0.35, 0.25, 1e-30, 0.40])
    found = search(model, [3] * 30, beam_size=2, length_penalty='length', length_penalty_alpha=1.0)
    (score, tokens), (second, _) = answers(found, 0)
    assert tokens == (0, EOS) and score == pytest.approx(math.log(0.35 * 0.9) / 2) == pytest.approx(-0.5776, abs=1e-4)
    assert second > math.log(0.40)


def test_length_penalty_counts_generated_tokens_only():
    """transformers#26624: with log-probability ln(1/4) a token, prompts and lengths do not matter at alpha 1."""
    model = chains.Chains(batch=3, vocabulary=4)
    model.tables[:] = 0
    config = DecodeConfig(beam_size=2, eos_ids=(), length_penalty='length')
    for prompt_length in (1, 50):
        prompt = Prompt(np.zeros((3, prompt_length), np.int32), np.zeros(3, np.int32), np.array([1, 4, 9], np.int32))
        found = run(model.tables, prompt, 1.0, config, 9)
        np.testing.assert_allclose(found.scores_BK[:, 0], math.log(0.25), atol=1e-5)
        assert found.lengths_BK[:, 0].tolist() == [1, 4, 9]
    assert length_penalty(1, 1.0, 'gnmt') == 1 and length_penalty(7, 1.0, 'gnmt') == 2
    assert length_penalty(9, 0.0, 'gnmt') == length_penalty(9, 0.0, 'length') == 1


def test_the_bound_fits_the_sign_of_the_penalty():
    assert best_attainable(-4.0, 2, 8, 1.0, 'length') == pytest.approx(-0.5)
    assert best_attainable(-4.0, 2, 8, -1.0, 'length') == pytest.approx(-12.0)


def test_finished_hypotheses_keep_their_tokens_and_scores():
    """One answer ends three steps before the others: its tokens are padded, its score stays."""
    model = chains.Chains(batch=30, vocabulary=4, seed=5)
    model.tables[:, :, EOS] = -9
    model.tables[:, 1] = [0, 0, 0, 3]
    found = search(model, [LIMIT] * 30, beam_size=3, length_penalty_alpha=0.0)
    for row in range(30):
        assert answers(found, row)[0] == (pytest.approx(model.log_probs(row, ())[EOS], abs=1e-5), (EOS,))
        assert found.tokens_BKT[row, 0].tolist() == [EOS, 0, 0, 0] and found.lengths_BK[row].tolist() == [1, 4, 4]


def test_an_end_token_at_the_last_step_counts_once():
    model = chains.Chains(batch=30, vocabulary=4)
    model.tables[:] = [1, 0.5, 0, -9]
    state = 1
    for token in (0, 0, 0):
        state = (state * 7 + token + 3) % chains.STATES
    model.tables[:, state] = [0, 0, 0, 5]
    found = search(model, [LIMIT] * 30, beam_size=3)
    best = chains.enumerate_all(functools.partial(model.log_probs, 0), (EOS,), LIMIT, 0.6, 'gnmt')[0]
    score, tokens = answers(found, 0)[0]
    assert tokens == best[1] == (0, 0, 0, EOS) and score == pytest.approx(best[0], abs=1e-5)


def test_sentences_which_are_done_early_do_not_change():
    """Rows of different limits, some of which end at once, equal each of them alone."""
    model = chains.Chains(batch=30, vocabulary=4, seed=7)
    model.tables[:10, :, EOS] += 6
    limits = [1 + row % LIMIT for row in range(30)]
    together = search(model, limits, beam_size=3)
    for row in range(0, 30, 3):
        alone = chains.Chains(batch=1, vocabulary=4)
        alone.tables = model.tables[row : row + 1]
        assert_same(answers(together, row), answers(search(alone, limits[row : row + 1], beam_size=3), 0))


def test_greedy_is_a_beam_of_one_which_stops_at_its_first_ending():
    def greedy(tables, prompt):
        return sample_loop(chains.step_fn(tables), *chains.begin(tables), prompt, DecodeConfig(eos_ids=(EOS,)), LIMIT)

    got = jax.jit(greedy)(CHAINS.tables, Prompt(**chains.prompts([LIMIT] * 30)))
    beam = search(
        CHAINS, [LIMIT] * 30, beam_size=1, early_stopping='first', length_penalty='length', length_penalty_alpha=0.0
    )
    np.testing.assert_array_equal(got.tokens_RT, beam.tokens_BKT[:, 0])
    np.testing.assert_allclose(got.sums_R, beam.scores_BK[:, 0], atol=1e-5)


def test_log_probs_are_the_models_own_and_sum_to_the_score():
    found = search(
        CHAINS, [LIMIT] * 30, beam_size=3, return_log_probs=True, forbidden_tokens=(1,), length_penalty_alpha=1.0
    )
    for row in range(30):
        for k, (score, tokens) in enumerate(answers(found, row)):
            want = [CHAINS.log_probs(row, tokens[:i])[token] for i, token in enumerate(tokens)]
            np.testing.assert_allclose(found.log_probs_BKT[row, k, : len(tokens)], want, atol=1e-5)
            assert (found.log_probs_BKT[row, k, len(tokens) :] == 0).all() and 1 not in tokens
            assert score == pytest.approx(sum(want) / chains.penalty(len(tokens), 1.0, 'gnmt'), abs=2e-5)


def test_the_forced_last_token_ends_every_cut_answer_at_no_cost():
    found = search(CHAINS, [LIMIT] * 30, beam_size=3, forced_last_token=EOS, length_penalty_alpha=0.0)
    for row in range(30):
        for score, tokens in answers(found, row):
            assert tokens[-1] == EOS
            want = sum(CHAINS.log_probs(row, tokens[:i])[token] for i, token in enumerate(tokens) if i < LIMIT - 1)
            assert score == pytest.approx(want, abs=2e-5)
