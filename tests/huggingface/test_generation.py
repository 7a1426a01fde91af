"""A folder with its search settings, loaded and searched here: the tokens are those of transformers' `generate`."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('transformers')

from benchmarks.parity import CASES, batch, make_theirs  # noqa: E402
from transformer_jax.decoding import generate  # noqa: E402
from transformer_jax.huggingface import load_pretrained  # noqa: E402

pytestmark = pytest.mark.parity

SETTINGS = {
    'marian': dict(num_beams=3, length_penalty=0.7, early_stopping=True, max_new_tokens=7, bad_words_ids=[[9], [4, 5]],
                   eos_token_id=2, pad_token_id=0, decoder_start_token_id=2, forced_eos_token_id=2),
    'gpt2': dict(max_new_tokens=5, repetition_penalty=1.3, no_repeat_ngram_size=2, eos_token_id=[3, 4], pad_token_id=0),
}  # fmt: skip


@pytest.mark.parametrize('name', SETTINGS)
def test_a_loaded_model_gives_the_tokens_of_transformers_with_the_folders_own_settings(name, tmp_path):
    case = next(case for case in CASES if case.name == name)
    case = dataclasses.replace(case, fields=case.fields | dict(n_positions=32) if name == 'gpt2' else case.fields)
    theirs = make_theirs(case, tmp_path)
    theirs.generation_config.update(**SETTINGS[name])
    theirs.generation_config.save_pretrained(tmp_path)
    inputs = batch(case)
    prefix = 'source_' if name == 'marian' else ''
    tokens, mask = inputs[prefix + 'tokens'], inputs[prefix + 'mask']
    long = [torch.tensor(array, dtype=torch.long) for array in (tokens, mask)]
    expected = theirs.generate(long[0], attention_mask=long[1]).numpy()
    expected = expected[:, 1:] if name == 'marian' else expected[:, tokens.shape[1] :]
    model, params = load_pretrained(tmp_path)
    found = generate(model, params, tokens, mask=mask).tokens[:, 0]
    assert model.config.decode.beam_size == SETTINGS[name].get('num_beams', 1)
    np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
    assert (found[:, expected.shape[1] :] == 0).all()
