"""Initial values: Glorot's limits, DeepNorm's gains, unit variances, and sameness on any number of devices."""

import jax
import numpy as np
import oracles
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_models import by_name, tiny

from transformer_jax.models import abstract_params, build, init_params

CONFIG = tiny(
    norm_position='deepnorm', num_layers=2, num_decoder_layers=3, d_model=64, d_ff=96, vocab_size=200,
    tie_embeddings='inputs', layer_stack='scan', qkv_bias=True,
)  # fmt: skip


@pytest.fixture(scope='module')
def params():
    return by_name(jax.jit(lambda key: init_params(build(CONFIG), key))(jax.random.key(0)), CONFIG)


def assert_uniform(kernel, fan_in, fan_out, gain):
    limit = gain * np.sqrt(6 / (fan_in + fan_out))
    assert np.abs(kernel).max() <= limit
    assert np.abs(kernel).max() > 0.99 * limit
    np.testing.assert_allclose(kernel.std(), limit / np.sqrt(3), rtol=0.03)


@pytest.mark.parametrize('stack, layers', [('encoder', 2), ('decoder', 3)])
def test_deepnorm_scales_values_outputs_and_ffn_by_beta_and_leaves_queries_and_keys(params, stack, layers):
    beta = oracles.deepnorm_beta(CONFIG, stack)
    seen = []
    for i in range(layers):
        layer = params[stack][f'layers_{i}']
        attentions = ['attention'] + (['cross_attention'] if stack == 'decoder' else [])
        for name in attentions:
            for projection, gain in (('query', 1), ('key', 1), ('value', beta), ('out', beta)):
                kernel = layer[name][projection]['kernel']
                assert_uniform(kernel, 64, 64, gain)
                seen.append(kernel.ravel()[0])
            assert (layer[name]['query']['bias'] == 0).all()
        for projection in ('up', 'down'):
            assert_uniform(layer['ffn'][projection]['kernel'], 64, 96, beta)
            seen.append(layer['ffn'][projection]['kernel'].ravel()[0])
            assert (layer['ffn'][projection]['bias'] == 0).all()
        assert (layer['ffn_residual']['out_norm']['scale'] == 1).all()
    assert len(set(seen)) == len(seen)


def test_scaled_embeddings_and_first_logits_have_variance_one(params):
    """Tables have standard deviation D^-1/2, so that sqrt(D) brings them to 1."""
    np.testing.assert_allclose(params['embedding']['embedding'].std() * np.sqrt(64), 1, rtol=0.03)
    assert_uniform(params['head']['output']['kernel'], 64, 200, 1)


def test_a_normal_initialiser_has_its_stated_deviation():
    config = tiny(kind='decoder', num_layers=1, d_model=64, d_ff=96, initializer='normal', initializer_stddev=0.03)
    params = jax.jit(lambda key: init_params(build(config), key))(jax.random.key(0))
    for leaf in (params['embedding']['embedding'], params['decoder']['layers_0']['ffn']['up']['kernel']):
        np.testing.assert_allclose(np.asarray(leaf).std(), 0.03, rtol=0.05)


def test_initial_values_are_the_same_however_they_are_sharded(params):
    """Every parameter is cut along its longest axis of a length which 8, or 4, or 2 divides."""
    model = build(CONFIG)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('a', 'b'))

    def cut(leaf):
        axes = [None] * len(leaf.shape)
        for names, ways in ((('a', 'b'), 8), ('b', 4), ('a', 2)):
            fit = [i for i, length in enumerate(leaf.shape) if length % ways == 0]
            if fit:
                axes[max(fit, key=lambda i: leaf.shape[i])] = names
                break
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = jax.tree.map(cut, abstract_params(model)[0])
    sharded = jax.jit(lambda key: init_params(model, key), out_shardings=shardings)(jax.random.key(0))
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(sharded))
    jax.tree.map(np.testing.assert_array_equal, by_name(jax.device_get(sharded), CONFIG), params)
