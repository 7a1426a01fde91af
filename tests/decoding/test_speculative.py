"""A draft model may change how fast an answer comes, and nothing else."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny_models import model_and_params, tiny

from transformer_jax.config import ModelConfig
from transformer_jax.decoding import DecodeConfig, Draft, generate
from transformer_jax.decoding.cache_api import init_cache, prefill, step
from transformer_jax.decoding.speculative import accept
from transformer_jax.errors import UserError
from transformer_jax.layers.cache import Cache
from transformer_jax.models import build
from transformer_jax.subconfigs import MixtureConfig, RopeScaling

VOCABULARY, EOS = 6, 1
CONFIGS = {
    'decoder': tiny(
        kind='decoder', vocab_size=VOCABULARY, position='rope', num_kv_heads=2, num_layers=1, tie_embeddings='none'
    ),
    'encoder_decoder': tiny(vocab_size=VOCABULARY, num_layers=1, tie_embeddings='inputs'),
}
LENGTHS = (5, 8, 1, 6)
GREEDY = DecodeConfig(max_new_tokens=20, eos_ids=(), return_log_probs=True)
PROCESSED = GREEDY.replace(
    repetition_penalty=1.2, no_repeat_ngram_size=4, min_new_tokens=5, forced_last_token=4, eos_ids=(EOS,)
)


def model_of(kind):
    """The model; its draft, which is smaller; and its parameters with noise, which often agree with it."""
    model, params = model_and_params(CONFIGS[kind])
    drafts = model_and_params(CONFIGS[kind].replace(d_model=8, d_ff=8), seed=5)
    rng = np.random.default_rng(9)
    noisy = jax.tree.map(lambda leaf: (leaf + 0.15 * rng.normal(size=leaf.shape)).astype('float32'), params)
    return model, params, {'smaller': drafts, 'noisy': (model, noisy), 'itself': (model, params)}


def rows(order=(0, 1, 2, 3)):
    tokens, mask = np.full((len(order), 8), 3), np.zeros((len(order), 8), int)
    for place, row in enumerate(order):
        tokens[place, 8 - LENGTHS[row] :] = np.random.default_rng(row).integers(2, VOCABULARY, LENGTHS[row])
        mask[place, 8 - LENGTHS[row] :] = 1
    return tokens, mask


def answer(kind, config, draft=None, order=(0, 1, 2, 3), ahead=3, **choices):
    model, params, drafts = model_of(kind)
    tokens, mask = rows(order)
    draft = None if draft is None else Draft(*drafts[draft], tokens=ahead)
    return generate(model, params, tokens, mask=mask, config=config, draft=draft, **choices)


def assert_same(got, want, order=slice(None)):
    np.testing.assert_array_equal(got.tokens, want.tokens[order])
    np.testing.assert_array_equal(got.lengths, want.lengths[order])
    np.testing.assert_allclose(got.scores, want.scores[order], atol=2e-5)
    np.testing.assert_allclose(got.log_probs, want.log_probs[order], atol=2e-5)


@pytest.mark.parametrize(
    'kind, draft, config',
    [('decoder', 'noisy', GREEDY), ('encoder_decoder', 'smaller', GREEDY), ('decoder', 'noisy', PROCESSED)],
    ids=['decoder', 'encoder_decoder', 'processed'],
)
def test_greedy_answers_are_those_without_a_draft(kind, draft, config):
    want = answer(kind, config)
    assert_same(answer(kind, config, draft), want)
    assert len({tuple(tokens) for tokens in want.tokens[:, 0].tolist()}) >= 3 and len(set(want.tokens.flat)) > 2


def test_a_row_is_answered_alone_as_in_company():
    want = answer('decoder', GREEDY)
    assert_same(answer('decoder', GREEDY, 'noisy', order=(3,)), want, [3])


def test_a_draft_which_is_always_right_saves_all_but_every_fourth_pass(monkeypatch):
    passes = []

    def counted(model, params, tokens, *others, **choices):
        if tokens.shape[1] == 4:
            jax.debug.callback(lambda: passes.append(1))
        return prefill(model, params, tokens, *others, **choices)

    monkeypatch.setitem(generate.__globals__, 'prefill', counted)
    answer('decoder', GREEDY.replace(max_new_tokens=33), 'itself')
    assert len(passes) == 8


def test_caches_without_room_for_refused_tokens_are_packed(monkeypatch):
    """With no slot to spare, rows which accept different numbers of tokens soon fill the caches."""
    packs, pack = [], Cache.pack

    def counted(cache):
        jax.debug.callback(lambda: packs.append(1))
        return pack(cache)

    monkeypatch.setattr(Cache, 'pack', counted)
    monkeypatch.setitem(generate.__globals__, 'cache_room', lambda capacity, ahead: capacity + ahead + 1)
    monkeypatch.setitem(generate.__globals__, 'slots', lambda prompt, room, beams: prompt + beams * (room - 1))
    config, order = GREEDY.replace(max_new_tokens=32), (0, 1, 3)
    want = answer('decoder', config, order=order)
    assert_same(answer('decoder', config, 'noisy', order=order), want)
    assert len(packs) >= 2


def test_a_cache_which_forgets_and_packs_goes_on_like_one_which_never_read():
    model, params = model_and_params(CONFIGS['decoder'])
    tokens, mask = rows()
    later = np.random.default_rng(1).integers(2, VOCABULARY, (4, 3))
    kept = np.array([3, 0, 2, 1])

    @jax.jit
    def forgetful(params):
        _, cache = prefill(model, params, tokens, init_cache(model, 4, 16), mask)
        _, cache = prefill(model, params, later, cache)
        cache = cache.forget(3, jnp.asarray(kept))
        logits, cache = step(model, params, later[:, :1], cache)
        packed = cache.pack()
        return (
            logits,
            step(model, params, later[:, 1:2], cache)[0],
            step(model, params, later[:, 1:2], packed)[0],
            packed,
        )

    @jax.jit
    def careful(params):
        _, cache = prefill(model, params, tokens, init_cache(model, 4, 16), mask)
        _, cache = prefill(model, params, later, cache, np.arange(3) < kept[:, None])
        logits, cache = step(model, params, later[:, :1], cache)
        return logits, step(model, params, later[:, 1:2], cache)[0]

    *got, packed = forgetful(params)
    want = careful(params)
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)
    np.testing.assert_allclose(got[2], want[1], atol=1e-5)
    assert packed.filled == max(np.array(LENGTHS) + kept + 1) and packed.valid[2, :4].all()


def exact(kind, log_probs, limit):
    """{tokens: probability} of every answer of at most `limit` tokens."""
    answers = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=limit):
        ends = [i + 1 for i, token in enumerate(tokens) if token == EOS]
        tokens = tokens[: ends[0]] if ends else tokens
        answers[tokens] = np.exp(sum(log_probs[tokens[:i]][token] for i, token in enumerate(tokens)))
    return answers


def all_log_probs(kind, model, params, limit):
    """{prefix: log p(. | prompt, prefix)} by one training forward of every text, in float64."""
    prompt = rows(order=(0,))[0][:, 8 - LENGTHS[0] :]
    texts = np.array(list(itertools.product(range(VOCABULARY), repeat=limit - 1)))
    if kind == 'decoder':
        given = np.concatenate([np.repeat(prompt, len(texts), axis=0), texts], axis=1)
        logits = jax.jit(lambda params: model.apply({'params': params}, given).logits)(params)
    else:
        source, target = np.repeat(prompt, len(texts), axis=0), np.pad(texts, [(0, 0), (1, 0)])
        logits = jax.jit(
            lambda params: model.apply({'params': params}, source_tokens=source, target_tokens=target).logits
        )(params)
    found = {}
    for text, logits_TV in zip(texts, np.asarray(logits, np.float64)[:, -limit:], strict=True):
        for i in range(limit):
            found[tuple(text[:i].tolist())] = logits_TV[i] - np.log(np.exp(logits_TV[i]).sum())
    return found


@pytest.mark.parametrize('kind', CONFIGS)
def test_draws_have_the_models_own_distribution(kind):
    """6000 draws of three tokens against the exact probability of every answer, by a chi-square test."""
    model, params, drafts = model_of(kind)
    want = exact(kind, all_log_probs(kind, model, params, 3), 3)
    drafted = exact(kind, all_log_probs(kind, *drafts['smaller'], 3), 3)
    assert sum(want.values()) == pytest.approx(1) and sum(abs(want[key] - drafted[key]) for key in want) > 0.3
    config = DecodeConfig(max_new_tokens=3, sample=True, num_return=6000, eos_ids=(EOS,))
    found = answer(kind, config, 'smaller', order=(0,), ahead=2, seed=3)
    answers = [tuple(tokens[:n].tolist()) for tokens, n in zip(found.tokens[0], found.lengths[0], strict=True)]
    assert chisquare(answers, want) > 1e-3
    # The test can tell: the same draws do not pass for the draft model's.
    assert chisquare(answers, drafted) < 1e-6
    np.testing.assert_allclose(found.scores[0], [np.log(want[tokens]) for tokens in answers], atol=1e-4)


def chisquare(answers, want):
    """The p-value of counts, answers expected fewer than five times being counted together."""
    counts = {tokens: 0 for tokens in want}
    for tokens in answers:
        counts[tokens] += 1
    often = [tokens for tokens in want if want[tokens] * len(answers) >= 5]
    observed, expected = [counts[tokens] for tokens in often], [want[tokens] * len(answers) for tokens in often]
    observed, expected = [*observed, len(answers) - sum(observed)], [*expected, len(answers) - sum(expected)]
    return stats.chisquare(observed, expected).pvalue


def test_filters_and_temperatures_of_each_row_hold_for_what_is_accepted():
    config = DecodeConfig(max_new_tokens=6, sample=True, top_k=2, temperature=(0.0, 0.7, 0.0, 1.3), eos_ids=())
    config = config.replace(return_log_probs=True)
    greedy = answer('decoder', GREEDY.replace(max_new_tokens=6))
    found = answer('decoder', config, 'smaller', seed=2)
    np.testing.assert_array_equal(found.tokens[[0, 2]], greedy.tokens[[0, 2]])
    assert (found.tokens[[1, 3]] != greedy.tokens[[1, 3]]).any()
    alone = answer('decoder', config.replace(temperature=0.0), 'smaller', order=(0,), seed=2)
    np.testing.assert_array_equal(alone.tokens[0], found.tokens[0])


def test_a_refused_token_is_replaced_from_what_the_draft_left_out():
    """Two tokens drafted by q, exact acceptance probabilities and remainders, on a grid of uniform numbers."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    uniform = (np.arange(1000) + 0.5) / 1000
    taken = np.zeros((1000, 2, 3))
    for token in range(3):
        drafted = np.full((1000, 1), token)
        count, rest = jax.jit(accept)(np.tile(p, (1000, 2, 1)), np.tile(q, (1000, 2, 1)), drafted, uniform[:, None])
        assert np.mean(count) == pytest.approx(min(1, p[token] / q[token]), abs=1e-3)
        refused = np.asarray(count) == 0
        taken[:, 0, token] += q[token] * ~refused
        taken[:, 0] += q[token] * np.where(refused[:, None], rest / rest.sum(axis=1, keepdims=True), 0)
        np.testing.assert_allclose(np.asarray(rest)[~refused], np.tile(p, (sum(~refused), 1)), atol=1e-6)
    np.testing.assert_allclose(taken[:, 0].mean(axis=0), p, atol=1e-3)


@pytest.mark.parametrize(
    'draft, choices, words',
    [
        ({}, dict(beam_size=2), 'beam_size = 2 does not go with a draft model'),
        (dict(vocab_size=9), {}, 'the draft model has vocab_size = 9; it must be 6'),
        (dict(kind='encoder_decoder'), {}, "the draft model has kind = 'encoder_decoder'; it must be 'decoder'"),
        (dict(max_positions=12), {}, '27 positions are needed; the draft model has 12'),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(draft, choices, words):
    model, params = model_and_params(CONFIGS['decoder'])
    config = DecodeConfig(max_new_tokens=20).replace(**choices)
    with pytest.raises(UserError) as caught:
        generate(model, params, rows()[0], config=config, draft=(build(CONFIGS['decoder'].replace(**draft)), {}))
    assert words in str(caught.value)
    with pytest.raises(UserError, match='at least 1 a round'):
        generate(model, params, rows()[0], draft=Draft(model, params, tokens=0))


@pytest.mark.parametrize(
    'choices, words',
    [
        (dict(rope_scaling=RopeScaling('dynamic', factor=2.0, original_positions=8)), 'rope_scaling.kind'),
        (dict(mixture=MixtureConfig(2, 1, dispatch='capacity'), ffn_bias=False), "choose 'dropless'"),
    ],
)
def test_a_model_whose_tokens_depend_on_their_company_is_refused(choices, words):
    config: ModelConfig = CONFIGS['decoder'].replace(**choices)
    model = build(config)
    with pytest.raises(UserError, match=words):
        generate(model, {}, rows()[0], draft=(model, {}))
