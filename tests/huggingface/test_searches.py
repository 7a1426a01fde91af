"""Searches against transformers' `generate`, ids and scores, on a tiny random model of every generative family.

A family takes half a minute or more to compile, so `pytest -m parity` has three, `pytest -m long_parity` the others.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('transformers')

from benchmarks.parity import CASES, make_theirs  # noqa: E402
from transformer_jax.decoding import DecodeConfig, generate  # noqa: E402
from transformer_jax.huggingface import load_pretrained  # noqa: E402

# The first case of a family is the one with a head for tokens.
SHORT = ('llama', 't5', 'marian')
LONG = (
    'mistral', 'mixtral', 'qwen2', 'qwen3', 'gemma2', 'olmo2', 'gpt2', 'bloom', 'gpt_neox', 'deepseek_v2',
    'deepseek_v3', 'bart', 'mbart', 'pegasus',
)  # fmt: skip
PROMPT, LIMIT = 7, 6
STOPPING = {'first': True, 'heuristic': False, 'bound': 'never'}
PROCESSED = (
    dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=2, forbidden_tokens=(5, (3, 4), (9, 12)),
         forced_last_token=2),
    dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=2, bad_words_ids=[[5], [3, 4], [9, 12]],
         forced_eos_token_id=2),
)  # fmt: skip


@functools.cache
def prompts(source: bool):
    """Two rows, of which the second is padded: on the left where text goes on, on the right as a source."""
    tokens, mask = np.random.default_rng(0).integers(3, 61, (2, PROMPT)), np.ones((2, PROMPT), int)
    mask[1, slice(-3, None) if source else slice(3)] = 0
    return np.where(mask, tokens, 0), mask


def assert_same_search(theirs, model, params, config: DecodeConfig, **choices):
    """Compares ids and scores of a search; returns its lengths."""
    source = model.config.kind == 'encoder_decoder'
    tokens, mask = prompts(source)
    found = generate(model, params, tokens, mask=mask, config=config)
    long = [torch.tensor(array, dtype=torch.long) for array in (tokens, mask)]
    want = theirs.generate(
        long[0], attention_mask=long[1], max_new_tokens=LIMIT, num_beams=config.beam_size,
        num_return_sequences=config.num_return, length_penalty=config.length_penalty_alpha,
        early_stopping=STOPPING[config.early_stopping], eos_token_id=list(config.eos_ids), pad_token_id=0,
        do_sample=False, use_cache=False, return_dict_in_generate=True, output_scores=True, **choices,
    )  # fmt: skip
    ids = want.sequences[:, 1 if source else PROMPT :].numpy()
    if config.beam_size > 1:
        scores = want.sequences_scores.numpy()
    else:
        scores = theirs.compute_transition_scores(want.sequences, want.scores, normalize_logits=True).numpy()
    lengths = found.lengths.reshape(-1)
    for row, length in enumerate(lengths):
        assert found.tokens.reshape(-1, LIMIT)[row, :length].tolist() == ids[row, :length].tolist()
        score = scores[row] if config.beam_size > 1 else scores[row, :length].sum()
        # An answer which does not exist has -1e9 there.
        score = -np.inf if score < -1e8 else score
        assert found.scores.reshape(-1)[row] == pytest.approx(score, abs=1e-4)
    return lengths


@pytest.mark.parametrize(
    'family',
    [pytest.param(family, marks=pytest.mark.parity) for family in SHORT]
    + [pytest.param(family, marks=pytest.mark.long_parity) for family in LONG],
)
def test_searches_have_the_ids_and_scores_of_transformers(family, tmp_path):
    case = next(case for case in CASES if case.family == family)
    theirs = make_theirs(case, tmp_path)
    # The search is stated whole; the forced tokens of a model's own settings would join it.
    theirs.generation_config.update(forced_eos_token_id=None, forced_bos_token_id=None)
    model, params = load_pretrained(tmp_path, generation=False)
    source = model.config.kind == 'encoder_decoder'
    start = theirs.config.decoder_start_token_id if source else 0
    greedy = DecodeConfig(
        max_new_tokens=LIMIT, pad_id=0, decoder_start_id=start, length_penalty='length', length_penalty_alpha=1.0,
        early_stopping='heuristic',
    )  # fmt: skip
    # Ends which the searches meet on their way, and one which they are forced to. Transformers does not ban an end.
    tokens, mask = prompts(source)
    unending = generate(model, params, tokens, mask=mask, config=greedy.replace(eos_ids=())).tokens
    greedy = greedy.replace(eos_ids=tuple({2, int(unending[0, 0, 3]), int(unending[1, 0, 4])} - {5}))
    beams = greedy.replace(beam_size=4, num_return=4)
    ours, its = PROCESSED
    if source:
        ours, its = ours | dict(forced_first_token=11), its | dict(forced_bos_token_id=11)
    compare = functools.partial(assert_same_search, theirs, model, params)
    compare(greedy)
    lengths = [
        compare(beams.replace(early_stopping=stopping, length_penalty_alpha=alpha))
        for stopping in STOPPING
        for alpha in (0.0, 1.0, 2.0)
    ]
    compare(greedy.replace(**ours), **its)
    compare(beams.replace(**ours), **its)
    assert np.min(lengths) < LIMIT and np.max(lengths) == LIMIT
