import pytest

from transformer_jax.data import config as data_config
from transformer_jax.data import objectives, sources, tokenizers


@pytest.fixture(scope='session')
def source():
    """The first 300 embedded pairs."""
    return sources.open_source('soft.en-de', 'train', limit=300)


@pytest.fixture(scope='session')
def cache_directory(tmp_path_factory):
    return tmp_path_factory.mktemp('vocabularies')


@pytest.fixture(scope='session')
def tokenizer(source, cache_directory):
    return tokenizers.open_tokenizer(data_config.DataConfig(vocab_size=1000), source, cache_directory)


@pytest.fixture(scope='session')
def make(tokenizer):
    """Returns a config with small batches and its objective."""

    def make(**fields):
        config = data_config.DataConfig(**{'batch_tokens': 8 * 128, 'row_multiple': 4, **fields})
        return config, objectives.make_objective(config, tokenizer)

    return make
