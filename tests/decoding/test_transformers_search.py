"""Searches against transformers' `generate`, on chains of which it sees a torch copy."""

from __future__ import annotations

import functools

import chains
import jax
import numpy as np
import pytest

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.beam import beam_loop
from transformer_jax.decoding.processors import Prompt
from transformer_jax.decoding.sampling import sample_loop

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytestmark = pytest.mark.parity

ROWS, VOCABULARY, LIMIT, FIRST = 8, 24, 9, 10
CHAINS = chains.Chains(batch=ROWS, vocabulary=VOCABULARY, seed=11, sharp=1.2)
CHAINS.tables[:, :, 1] += 1.5
STOPPING = {'first': True, 'heuristic': False, 'bound': 'never'}


class TorchChains(transformers.PreTrainedModel, transformers.GenerationMixin):
    """The chains as a model of transformers; the prompt of row r is the id FIRST + r."""

    config_class = transformers.PretrainedConfig
    main_input_name = 'input_ids'

    def __init__(self, config):
        super().__init__(config)
        self.tables = torch.nn.Parameter(torch.tensor(CHAINS.tables), requires_grad=False)

    def forward(self, input_ids, **_):
        state = torch.ones_like(input_ids[:, 0])
        for token in input_ids.T[1:]:
            state = (state * 7 + token + 3) % chains.STATES
        return transformers.modeling_outputs.CausalLMOutput(logits=self.tables[input_ids[:, 0] - FIRST, state][:, None])


@functools.cache
def torch_model():
    return TorchChains(transformers.PretrainedConfig(vocab_size=VOCABULARY)).eval()


@functools.partial(jax.jit, static_argnames='config')
def ours(prompt, alpha, config):
    tables = jax.numpy.asarray(CHAINS.tables)
    logits, cache = chains.begin(tables)
    if config.beam_size == 1:
        return sample_loop(chains.step_fn(tables), logits, cache, prompt, config, LIMIT).answers(1)
    return beam_loop(chains.step_fn(tables), chains.gather, logits, cache, prompt, alpha, config, LIMIT)[0]


def compare(config, **theirs):
    prompt = Prompt(
        np.arange(FIRST, FIRST + ROWS, dtype=np.int32)[:, None],
        np.zeros(ROWS, np.int32),
        np.full(ROWS, LIMIT, np.int32),
    )
    found = ours(prompt, config.length_penalty_alpha, config.replace(length_penalty_alpha=0.0))
    want = torch_model().generate(
        torch.arange(FIRST, FIRST + ROWS)[:, None],
        num_beams=config.beam_size,
        num_return_sequences=config.num_return,
        max_new_tokens=LIMIT,
        eos_token_id=list(config.eos_ids),
        pad_token_id=0,
        do_sample=False,
        use_cache=False,
        length_penalty=config.length_penalty_alpha,
        early_stopping=STOPPING[config.early_stopping],
        return_dict_in_generate=True,
        output_scores=True,
        **theirs,
    )
    sequences = want.sequences[:, 1:].numpy()
    if config.beam_size > 1:
        scores = want.sequences_scores.numpy()
    else:
        parts = torch_model().compute_transition_scores(want.sequences, want.scores, normalize_logits=True).numpy()
    lengths = np.asarray(found.lengths_BK).reshape(-1)
    for row, (tokens, length) in enumerate(zip(np.asarray(found.tokens_BKT).reshape(-1, LIMIT), lengths, strict=True)):
        # Beam search there fills with the end token where pad is 0: compare up to the end.
        assert tokens[:length].tolist() == sequences[row][:length].tolist()
        assert length == LIMIT or tokens[length - 1] in config.eos_ids
        if config.beam_size == 1:
            assert np.asarray(found.scores_BK).reshape(-1)[row] == pytest.approx(parts[row, :length].sum(), abs=1e-4)
    if config.beam_size > 1:
        np.testing.assert_allclose(np.asarray(found.scores_BK).reshape(-1), scores, atol=1e-4)
    return lengths


@pytest.mark.parametrize('early_stopping', STOPPING)
@pytest.mark.parametrize('eos_ids', [(1,), (1, 7, 9)])
def test_beams_of_every_length_penalty_and_stopping(early_stopping, eos_ids):
    means = [
        compare(
            DecodeConfig(
                beam_size=4,
                num_return=4,
                length_penalty='length',
                length_penalty_alpha=alpha,
                early_stopping=early_stopping,
                eos_ids=eos_ids,
            )
        ).mean()
        for alpha in (-1.0, 0.0, 1.0, 2.0)
    ]
    assert means[0] < means[2] <= means[3]


PROCESSORS = [
    (dict(repetition_penalty=1.7), dict(repetition_penalty=1.7)),
    (dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=2)),
    (dict(forbidden_tokens=(5, (3, 4), (1, 2))), dict(bad_words_ids=[[5], [3, 4], [1, 2]])),
    (dict(min_new_tokens=4), dict(min_new_tokens=4)),
    (dict(forced_first_token=6), dict(forced_bos_token_id=6)),
    (dict(forced_last_token=1), dict(forced_eos_token_id=1)),
    (
        dict(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=3, forced_last_token=1),
        dict(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=3, forced_eos_token_id=1),
    ),
]


@pytest.mark.parametrize('choices, theirs', PROCESSORS)
@pytest.mark.parametrize('beams', [1, 4])
def test_processed_greedy_and_beams(beams, choices, theirs):
    compare(
        DecodeConfig(
            beam_size=beams,
            num_return=beams,
            length_penalty='length',
            length_penalty_alpha=1.0,
            early_stopping='heuristic',
            **choices,
        ),
        **theirs,
    )
