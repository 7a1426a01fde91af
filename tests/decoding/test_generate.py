"""generate, stream and score on tiny models, against searches over the training forward."""

from __future__ import annotations

import functools

import chains
import jax
import jax.monitoring
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.decoding import DecodeConfig, generate, score, stream
from transformer_jax.decoding.generate import check_overflow, resolve
from transformer_jax.errors import UserError
from transformer_jax.models import build, init_params

VOCABULARY, EOS = 9, 1
TINY = ModelConfig(
    kind='decoder',
    vocab_size=VOCABULARY,
    d_model=8,
    d_ff=16,
    num_layers=1,
    num_heads=2,
    dropout=0.0,
    logits_bias=True,
    tie_embeddings='output',
    max_positions=40,
)
MODELS = {'decoder': TINY, 'encoder_decoder': TINY.replace(kind='encoder_decoder', tie_embeddings='all')}
GREEDY = DecodeConfig(max_new_tokens=6, return_log_probs=True)
BEAMS = DecodeConfig(max_new_tokens=6, beam_size=3, num_return=3, return_log_probs=True)
LENGTHS = (5, 8, 1, 6)


@functools.cache
def tiny(kind):
    """A model with every parameter drawn, the output bias included, and sharper than at its start."""
    model = build(MODELS[kind])
    rng = np.random.default_rng(7)
    return model, jax.tree.map(
        lambda leaf: jax.numpy.asarray(leaf + 0.5 * rng.normal(size=leaf.shape), 'float32'),
        init_params(model, jax.random.key(3)),
    )


def padded(side='left', order=(0, 1, 2, 3)):
    """(tokens, mask) of rows padded on one side with an arbitrary id."""
    tokens, mask = np.full((len(order), 8), 7), np.zeros((len(order), 8), int)
    for place, row in enumerate(order):
        slots = slice(8 - LENGTHS[row], None) if side == 'left' else slice(LENGTHS[row])
        tokens[place, slots] = np.random.default_rng(row).integers(2, VOCABULARY, LENGTHS[row])
        mask[place, slots] = 1
    return tokens, mask


def answer(kind, config, side='left', order=(0, 1, 2, 3), **choices):
    model, params = tiny(kind)
    tokens, mask = padded(side, order)
    return generate(model, params, tokens, mask=mask, config=config, **choices)


@functools.partial(jax.jit, static_argnames='model')
def forward(params, arguments, model):
    return jax.nn.log_softmax(model.apply({'params': params}, **arguments).logits)


def log_probs_of(kind, row, after=()):
    """log p(. | after, prefix) of one row, by the training forward of the whole text, without a cache."""
    model, params = tiny(kind)
    text = padded(order=(row,))[0][0, 8 - LENGTHS[row] :]

    @functools.cache
    def log_probs(prefix):
        read = [0, *after, *prefix] if kind == 'encoder_decoder' else [*text, *after, *prefix]
        arguments = {'tokens': np.array([[*read, *[0] * (14 - len(read))]])}
        if kind == 'encoder_decoder':
            source = np.array([[*text, *[0] * (8 - len(text))]])
            arguments = {
                'source_tokens': source,
                'source_mask': np.arange(8)[None] < len(text),
                'target_tokens': arguments['tokens'],
            }
        return np.asarray(forward(params, arguments, model), np.float64)[0, len(read) - 1]

    return log_probs


def assert_same_answers(got, want, order):
    np.testing.assert_array_equal(got.tokens, want.tokens[list(order)])
    np.testing.assert_array_equal(got.lengths, want.lengths[list(order)])
    np.testing.assert_allclose(got.scores, want.scores[list(order)], atol=1e-5)
    np.testing.assert_allclose(got.log_probs, want.log_probs[list(order)], atol=1e-5)


@pytest.mark.parametrize('kind', MODELS)
def test_searches_over_the_cache_are_those_over_the_training_forward(kind):
    greedy, beams = answer(kind, GREEDY), answer(kind, BEAMS)
    assert greedy.tokens.shape == (4, 1, 6) and beams.tokens.shape == (4, 3, 6)
    assert len({*greedy.lengths.flat, *beams.lengths.flat}) > 2
    for row in range(4):
        log_probs = log_probs_of(kind, row)
        want = chains.greedy(log_probs, (EOS,), 6)
        assert greedy.tokens[row, 0].tolist() == [*want, *[0] * (6 - len(want))]
        for k, (value, tokens) in enumerate(chains.textbook_beams(log_probs, (EOS,), 6, 3, 0.6, 'gnmt', 'bound')):
            assert tuple(beams.tokens[row, k, : beams.lengths[row, k]]) == tokens
            assert beams.scores[row, k] == pytest.approx(value, abs=1e-4)


def test_a_full_beam_is_brute_force():
    config = DecodeConfig(
        max_new_tokens=3,
        beam_size=(VOCABULARY - 1) ** 2,
        num_return=5,
        length_penalty='length',
        length_penalty_alpha=1.0,
    )
    found = answer('encoder_decoder', config)
    for row in range(4):
        want = chains.enumerate_all(log_probs_of('encoder_decoder', row), (EOS,), 3, 1.0, 'length')[:5]
        np.testing.assert_allclose(found.scores[row], [value for value, _ in want], atol=1e-5)
        assert [tuple(found.tokens[row, k, : found.lengths[row, k]]) for k in range(5)] == [best for _, best in want]


@pytest.mark.parametrize('kind, config', [('decoder', GREEDY), ('encoder_decoder', BEAMS)])
def test_padding_side_order_and_company_of_rows_do_not_matter(kind, config):
    """Three rows of different lengths and two beams: a single row, or sources tiled 0 1 2 0 1 2, cannot show it."""
    want = answer(kind, config)
    assert_same_answers(answer(kind, config, 'right'), want, range(4))
    assert_same_answers(answer(kind, config, order=(2, 0, 3, 1)), want, (2, 0, 3, 1))
    for row in (0, 1):
        assert_same_answers(answer(kind, config, order=(row,)), want, (row,))


def test_a_prompt_of_one_token_is_answered_alone():
    assert_same_answers(answer('decoder', GREEDY, order=(2,)), answer('decoder', GREEDY), (2,))


def test_another_length_of_the_bucket_does_not_compile():
    compiled = []

    def note(event, duration, **details):
        compiled.extend([event] * (event == '/jax/core/compile/backend_compile_duration'))

    want = answer('decoder', BEAMS)
    jax.monitoring.register_event_duration_secs_listener(note)
    model, params = build(MODELS['decoder']), tiny('decoder')[1]
    tokens = np.full((4, 7), 3)
    for config in (BEAMS.replace(max_new_tokens=5), BEAMS.replace(max_new_tokens=8, length_penalty_alpha=1.0)):
        assert generate(model, params, tokens, config=config).tokens.shape == (4, 3, config.max_new_tokens)
    assert not compiled
    jax.jit(lambda x: x + len(tokens))(1.0)
    assert compiled
    assert_same_answers(answer('decoder', BEAMS), want, range(4))


@pytest.mark.parametrize('kind', MODELS)
def test_log_probs_are_those_of_the_training_forward_and_sum_to_the_score(kind):
    model, params = tiny(kind)
    tokens, mask = padded()
    for config, k in ((GREEDY, 0), (BEAMS, 2)):
        found = answer(kind, config)
        real = np.arange(6) < found.lengths[:, k, None]
        values = score(model, params, tokens, found.tokens[:, k], mask=mask, target_mask=real)
        np.testing.assert_allclose(found.log_probs[:, k], values, atol=1e-5)
        penalties = [chains.penalty(n, 0.6, 'gnmt') if config is BEAMS else 1 for n in found.lengths[:, k]]
        np.testing.assert_allclose(found.scores[:, k], values.sum(axis=1) / penalties, atol=1e-5)


def test_streamed_tokens_are_the_generated_ones():
    model, params = tiny('decoder')
    tokens, mask = padded()
    config = GREEDY.replace(sample=True, temperature=(0, 1.5, 1.5, 0), return_log_probs=False)
    pieces = list(stream(model, params, tokens, mask=mask, config=config, seed=4))
    want = generate(model, params, tokens, mask=mask, config=config, seed=4)
    np.testing.assert_array_equal(np.stack(pieces, axis=1), want.tokens[:, 0, : len(pieces)])
    assert len(pieces) == want.lengths.max()
    greedy = answer('decoder', GREEDY)
    np.testing.assert_array_equal(want.tokens[[0, 3]], greedy.tokens[[0, 3]])
    assert (generate(model, params, tokens, mask=mask, config=config, seed=5).tokens != want.tokens).any()


def test_draws_of_one_sentence_differ_and_the_best_comes_first():
    config = DecodeConfig(max_new_tokens=6, sample=True, num_return=5, return_log_probs=True)
    found = answer('encoder_decoder', config)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    assert all(len({tuple(tokens) for tokens in row}) > 1 for row in found.tokens.tolist())
    np.testing.assert_allclose(found.log_probs.sum(axis=-1), found.scores, atol=1e-5)


def test_limits_over_the_source_and_a_forced_prefix():
    config = GREEDY.replace(max_new_tokens_over_source=2, eos_ids=(), prefix_tokens=(4, 5), max_new_tokens=8)
    found = answer('encoder_decoder', config)
    assert found.lengths[:, 0].tolist() == [min(length + 2, 8) for length in LENGTHS]
    for row in range(4):
        want = chains.greedy(log_probs_of('encoder_decoder', row, after=(4, 5)), (), found.lengths[row, 0])
        assert tuple(found.tokens[row, 0, : len(want)]) == want


def test_the_models_own_search_is_the_default():
    own = build(TINY.replace(decode=BEAMS))
    assert resolve(own, None) == BEAMS and resolve(own, GREEDY) == GREEDY
    assert resolve(build(TINY), None) == DecodeConfig()


@pytest.mark.parametrize(
    'tokens, choices, words',
    [
        ([[3, 9]], {}, 'the prompt holds id 9 in row 0; the vocabulary has 9 ids'),
        ([[3, -1]], {}, 'the prompt holds id -1 in row 0'),
        ([3, 4], {}, 'it is (batch, length) of integers'),
        ([[3, 4]], dict(eos_ids=(50,)), 'eos_ids holds id 50; the vocabulary has 9 ids'),
        ([[3] * 30], dict(max_new_tokens=12), '30 tokens and 12 new ones need 41 positions; the model has 40'),
        ([[3] * 41], dict(max_new_tokens=None), '41 tokens and 1 new ones need 41 positions; the model has 40'),
        ([[3, 4]], dict(sample=True, temperature=(1, 1, 1)), 'temperature has 3 numbers for 1 rows'),
    ],
)
def test_bad_input_is_refused_in_words(tokens, choices, words):
    model, params = tiny('decoder')
    with pytest.raises(UserError) as caught:
        generate(model, params, tokens, config=DecodeConfig(max_new_tokens=6).replace(**choices))
    assert words in str(caught.value)


def test_rows_without_text_or_answer_are_refused():
    model, params = tiny('decoder')
    with pytest.raises(UserError, match='row 1 of the prompt has no token'):
        generate(model, params, [[3], [3]], mask=[[1], [0]])
    with pytest.raises(UserError, match='the cache is full'):
        check_overflow(np.array(True))
    with pytest.raises(UserError, match='only one answer per row can be streamed'):
        stream(model, params, [[3]], config=BEAMS)
    broken = jax.tree.map(lambda leaf: leaf * np.float32('nan'), params)
    with pytest.raises(UserError, match='row 0 has no answer: the logits are not finite'):
        generate(model, broken, *padded()[:1], config=GREEDY)
