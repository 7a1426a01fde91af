import json

import pytest

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import sources


def test_config_comes_back_from_json():
    config = data_config.DataConfig(batching='bucket', bucket_boundaries=(8, 24), limit=5)
    assert data_config.DataConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    'fields, message',
    [
        ({'batching': 'packed'}, "data.batching = 'packed' is unknown; did you mean 'pack'"),
        ({'too_long': 'drop'}, 'data.too_long'),
        ({'direction': 'backward'}, 'data.direction'),
        ({'decoder_start': 'boss'}, "did you mean 'bos'"),
        ({'batch_tokens': 1000}, r'data.batch_tokens = 1000 .* at least 1024'),
        ({'batch_tokens': 0}, 'data.batch_tokens = 0'),
        ({'source_length': 1}, 'data.source_length = 1'),
        ({'limit': -1}, 'data.limit = -1'),
        ({'limit': 2.5}, 'data.limit = 2.5'),
        ({'bucket_boundaries': (16, 8)}, r'data.bucket_boundaries = \(16, 8\)'),
        ({'bucket_boundaries': (64,)}, 'between 1 and 63'),
        ({'train': ''}, 'data.train is empty'),
    ],
)
def test_value_out_of_range_is_refused_in_one_line(fields, message):
    with pytest.raises(errors.UserError, match=message) as caught:
        data_config.DataConfig(**fields)
    assert '\n' not in str(caught.value)


def test_unknown_field_gets_the_nearest_name():
    with pytest.raises(errors.UserError, match="did you mean 'batch_tokens'"):
        data_config.DataConfig.from_dict({'batch_token': 5})


def test_splits_follow_the_training_set_and_text_files_have_none_of_their_own():
    assert data_config.DataConfig().spec('test') == 'soft.en-de'
    assert data_config.DataConfig(train='tfds:wmt14_translate/de-en').spec('valid') == 'tfds:wmt14_translate/de-en'
    config = data_config.DataConfig(train='mine.tsv', valid='valid.tsv', test='none')
    assert config.spec('valid') == 'valid.tsv' and config.spec('test') is None
    assert sources.open_split(config, 'test') is None
    with pytest.raises(errors.UserError, match="give data.valid='file.tsv', or 'none'"):
        data_config.DataConfig(train='mine.tsv').spec('valid')
