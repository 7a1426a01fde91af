"""Searches on a mesh are those on one device, and their cache lies on all devices."""

import jax
import numpy as np
import pytest
from tiny_models import model_and_params, some_tokens, tiny

import transformer_jax
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.generate import search, start
from transformer_jax.decoding.inputs import prepare
from transformer_jax.decoding.placement import place_rows
from transformer_jax.models import abstract_params
from transformer_jax.sharding import MeshConfig, make_mesh, resolve, tracing_on
from transformer_jax.subconfigs import MixtureConfig

MESH = MeshConfig(data=1, fsdp=2, expert=2, tensor=2)
CONFIG = tiny(
    vocab_size=24, num_layers=1, norm='rms', norm_position='pre', position='rope', ffn='gated_silu', ffn_bias=False,
    mixture=MixtureConfig(4, 2),
)  # fmt: skip
# Five rows on four row devices: the search fills them up.
SOURCE = some_tokens(5, 6, vocabulary=24)
MASK = np.arange(6) < np.array([6, 3, 5, 1, 4])[:, None]


@pytest.fixture(scope='module')
def placed():
    model, params = model_and_params(CONFIG)
    mesh = make_mesh(MESH)
    return model, params, jax.device_put(params, resolve(*abstract_params(model), mesh)), mesh


@pytest.mark.parametrize(
    'config',
    [
        # With room for 16 tokens and then for 32, so that the cache is packed on the way.
        DecodeConfig(max_new_tokens=32, beam_size=3, num_return=2, length_penalty='length', length_penalty_alpha=0.6),
        DecodeConfig(max_new_tokens=6, sample=True, num_return=2, return_log_probs=True),
    ],
    ids=['beams', 'draws'],
)
def test_answers_on_a_mesh_are_those_of_one_device(placed, config):
    model, alone, many, _ = placed
    one, other = (
        transformer_jax.generate(model, params, SOURCE, mask=MASK, config=config, seed=3) for params in (alone, many)
    )
    assert one.tokens.shape[:2] == (5, 2) and len(np.unique(one.tokens)) > 5
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.lengths, other.lengths)
    np.testing.assert_allclose(one.scores, other.scores, atol=2e-5)


def test_the_cache_is_split_over_rows_and_heads(placed):
    model, _, params, mesh = placed
    inputs, static, capacity = prepare(model.config, SOURCE, MASK, DecodeConfig(max_new_tokens=6), 0)
    inputs = place_rows(inputs, mesh)
    assert inputs.source.shape[0] == 8 and inputs.source.addressable_shards[0].data.shape[0] == 2

    def read(params, inputs):
        with tracing_on(mesh):
            return start(model, params, inputs, capacity)[1]

    cache = jax.jit(read)(params, inputs)
    for stored in (*cache.mixers, *cache.cross):
        for array in (stored.key_BKHS, stored.value_BKSH):
            assert array.shape[:2] == (8, 4)
            assert {shard.data.shape[:2] for shard in array.addressable_shards} == {(2, 2)}
    text = search.lower(params, inputs, model=model, config=static, capacity=capacity, mesh=mesh).compile().as_text()
    assert 'reduce-scatter' in text and 'all-reduce' in text
