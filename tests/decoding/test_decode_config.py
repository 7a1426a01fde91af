"""DecodeConfig says in words what is wrong."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError

NAMES = """max_new_tokens max_new_tokens_over_source min_new_tokens beam_size num_return length_penalty
length_penalty_alpha early_stopping temperature top_k top_p min_p sample repetition_penalty
no_repeat_ngram_size forbidden_tokens forced_first_token forced_last_token eos_ids pad_id
decoder_start_id prefix_tokens beam_groups diversity_penalty return_log_probs""".split()


def test_the_names_are_those_of_the_contract():
    assert [field.name for field in dataclasses.fields(DecodeConfig)] == NAMES


def test_a_config_survives_json():
    config = DecodeConfig(
        beam_size=4, forbidden_tokens=[7, [8, 9]], eos_ids=[1, 2], prefix_tokens=[5], max_new_tokens=9
    )
    again = DecodeConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config) and again.forbidden_tokens == (7, (8, 9))


def test_one_end_id_and_numpy_integers_are_taken():
    config = DecodeConfig(eos_ids=np.int64(3), pad_id=np.int32(2))
    assert config.eos_ids == (3,) and type(config.pad_id) is int


@pytest.mark.parametrize(
    'choices, words',
    [
        (dict(early_stopping='bond'), "early_stopping = 'bond' is unknown; did you mean 'bound'?"),
        (dict(length_penalty='gmnt'), "did you mean 'gnmt'?"),
        (dict(beam_size=4, beam_groups=3), 'beam_groups = 3 does not divide beam_size = 4'),
        (dict(diversity_penalty=0.5), 'needs beam_groups'),
        (dict(sample=True, beam_size=2), 'beam_size = 1'),
        (dict(num_return=2), 'num_return = 2 is more than beam_size = 1'),
        (dict(top_k=5), 'set sample = True'),
        (dict(temperature=0.7), 'set sample = True'),
        (dict(sample=True, temperature=-1.0), 'temperature = -1.0 is out of range; it is at least 0'),
        (dict(sample=True, top_p=0.0), 'top_p = 0.0 is out of range'),
        (dict(sample=True, min_p=1.5), 'min_p = 1.5 is out of range'),
        (dict(repetition_penalty=0.0), 'repetition_penalty = 0.0 is out of range'),
        (dict(max_new_tokens=0), 'max_new_tokens = 0 is out of range; it is at least 1, or None'),
        (dict(min_new_tokens=5, max_new_tokens=4), 'min_new_tokens = 5 is more than max_new_tokens = 4'),
        (dict(eos_ids=(-1,)), 'eos_ids holds -1'),
        (dict(forbidden_tokens=(2, (3, 'x'))), "forbidden_tokens holds 'x'"),
        (dict(forbidden_tokens=((),)), 'empty sequence'),
    ],
)
def test_contradictions_are_said_in_words(choices, words):
    with pytest.raises(UserError) as caught:
        DecodeConfig(**choices)
    assert words in str(caught.value) and '\n' not in str(caught.value)


def test_unknown_names_get_the_nearest():
    for build in (DecodeConfig.from_dict, lambda values: DecodeConfig().replace(**values)):
        with pytest.raises(UserError, match="no field 'beam_sise'; did you mean 'beam_size'?"):
            build({'beam_sise': 4})
