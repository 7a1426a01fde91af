"""Quantised weights and caches, against numpy and against the same model with dequantised weights."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_models import model_and_params, some_tokens, tiny

from transformer_jax.decoding import DecodeConfig, generate, init_cache, prefill, step
from transformer_jax.errors import UserError
from transformer_jax.layers.cache import QuantizedKeysValues
from transformer_jax.models import abstract_params, build, scan_params
from transformer_jax.ops.products import einsum
from transformer_jax.ops.quantized import QuantizedArray, pack, quantize, unpack, unpack_on_device
from transformer_jax.quantization import (
    dequantize,
    load_quantized,
    save_quantized,
)
from transformer_jax.quantization import quantize as quantize_model
from transformer_jax.subconfigs import LatentConfig, MixtureConfig

DECODER = tiny(kind='decoder', vocab_size=32, position='rope', num_kv_heads=2, d_ff=32)
TRANSLATOR = tiny(vocab_size=32, d_ff=32)
EXPERTS = DECODER.replace(
    num_kv_heads=None, ffn_bias=False, d_k=8, latent=LatentConfig(kv_rank=16, rotary_dim=4, query_rank=16),
    mixture=MixtureConfig(2, 1, d_ff=16, shared_experts=1),
)  # fmt: skip


def rounded(array, bits, blocks):
    """(array / scale, scale in fp32, scale in bf16) in float64, block by block, in numpy."""
    ratio, exact, stored = np.zeros(array.shape), np.zeros(array.shape), np.zeros(array.shape)
    tiles = [size // count for size, count in zip(array.shape, blocks, strict=True)]
    for block in np.ndindex(*blocks):
        where = tuple(slice(i * tile, (i + 1) * tile) for i, tile in zip(block, tiles, strict=True))
        largest = np.abs(array[where].astype(np.float64)).max()
        exact[where] = largest / (2 ** (bits - 1) - 0.5) if largest else 1
        ratio[where] = array[where] / exact[where]
        stored[where] = np.float64(ml_dtypes.bfloat16(exact[where].flat[0]))
    return ratio, exact, stored


def floats(quantized, array):
    """What the integers of a quantised array stand for, in numpy; the scales are not taken from it."""
    bits = 8 if quantized.dtype == jnp.int8 else 4
    return np.asarray(quantized.values).astype(np.float64) * rounded(array, bits, quantized.scale.shape)[2]


def matrix(*shape, seed=0):
    """Random numbers with an outlier in one column and a column of zeros."""
    array = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    array[..., 1], array[(0,) * (len(shape) - 1) + (2,)] = 0, 1000
    return array


CASES = [(8, (16, 8), (1, 8)), (4, (16, 8), (4, 8)), (8, (4, 6, 8), (1, 1, 8)), (4, (4, 6, 8), (2, 1, 8)),
         (4, (4, 6, 8), (4, 2, 8)), (4, (4, 6, 8), (2, 3, 8)), (8, (12, 8), (12, 1)),
         (4, (12, 8), (12, 2))]  # fmt: skip


@pytest.mark.parametrize('bits, shape, blocks', CASES)
def test_integers_and_scales_are_those_of_numpy_with_zeros_and_outliers(bits, shape, blocks):
    array = matrix(*shape)
    found = jax.jit(quantize, static_argnums=(1, 2))(array, bits, blocks)
    ratio, exact, stored = rounded(array, bits, blocks)
    limit = 2 ** (bits - 1)
    # The nearest integer, whichever side is taken half-way, where the largest number of a block stands.
    nearest = np.clip(ratio, -limit, limit - 1)
    assert np.abs(np.asarray(found.values).astype(float) - nearest).max() <= 0.5 + 1e-4
    np.testing.assert_allclose(found.astype('float32'), floats(found, array), rtol=1e-6)
    assert found.scale.dtype == jnp.bfloat16 and (np.asarray(found.scale, np.float32) > 0).all()
    # Half a step, and for the largest integers what the rounding of a scale to bf16 adds.
    allowed = (0.5 + limit / 2**8) * np.maximum(exact, stored) * 1.001
    assert (np.abs(array - found.astype('float32')) <= allowed).all()
    np.testing.assert_array_equal(found.astype('float32')[..., 1], 0)


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 2e-2)])
@pytest.mark.parametrize('bits, shape, blocks', CASES)
def test_products_are_those_with_the_numbers_the_integers_stand_for(bits, shape, blocks, dtype, tolerance):
    array = matrix(*shape)
    quantized = jax.jit(quantize, static_argnums=(1, 2))(array, bits, blocks)
    want_matrix = floats(quantized, array)
    if blocks[0] == 12:
        x = np.random.default_rng(1).normal(size=(2, 3, 8)).astype(dtype)
        got, want = einsum('BTD,VD->BTV', jnp.asarray(x), quantized, jnp.float32), x.astype(float) @ want_matrix.T
        rows = quantized.take_rows(jnp.array([[3, -1], [11, 12]]))
        np.testing.assert_allclose(np.asarray(rows)[:, 0], want_matrix[[3, 11]], rtol=1e-6)
        assert np.isnan(np.asarray(rows)[:, 1]).all()
    else:
        x = np.random.default_rng(1).normal(size=(2, 3, *shape[:-1])).astype(dtype)
        letters = 'ab'[: len(shape) - 1]
        got = einsum(f'uv{letters},{letters}z->uvz', jnp.asarray(x), quantized, jnp.float32)
        want = np.tensordot(x.astype(float), want_matrix, len(shape) - 1)
        flat = quantized.reshape(-1 if len(shape) == 2 else shape[0] * shape[1], 8) if len(shape) == 3 else quantized
        again = einsum('uvy,yz->uvz', jnp.asarray(x).reshape(2, 3, -1), flat, jnp.float32)
        np.testing.assert_allclose(again, got, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())


def test_a_product_of_integers_rounds_each_vector_by_its_own_largest_number():
    array, x = matrix(16, 8), matrix(5, 16, seed=2)
    quantized = dataclasses.replace(quantize(array, 8, (1, 8)), activations=True)
    got = jax.jit(lambda x: einsum('uy,yz->uz', x, quantized))(x)
    vectors = quantize(x, 8, (5, 1))
    ratio, scale, _ = rounded(x, 8, (5, 1))
    integers = np.asarray(vectors.values).astype(float)
    assert np.abs(integers - np.clip(ratio, -128, 127)).max() <= 0.5 + 1e-4
    want = (integers * scale) @ floats(quantized, array)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    unrounded = x @ floats(quantized, array)
    assert np.abs(got - unrounded).max() > 1e-4 * np.abs(unrounded).max()
    # A vector of zeros gives zeros.
    np.testing.assert_array_equal(jax.jit(lambda x: einsum('uy,yz->uz', x, quantized))(0 * x), 0)


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params):
    tokens = some_tokens(2, 7)
    if model.config.kind == 'encoder_decoder':
        return model.apply({'params': params}, source_tokens=tokens, target_tokens=tokens[:, ::-1]).logits
    return model.apply({'params': params}, tokens).logits


@pytest.mark.parametrize('config', [DECODER, TRANSLATOR, EXPERTS], ids=['decoder', 'translator', 'latent_experts'])
def test_a_quantised_model_is_the_model_with_the_numbers_its_integers_stand_for(config):
    model, params = model_and_params(config)
    for weights in ('int8', 'int4'):
        own, quantized = quantize_model(model, params, weights, group=8)
        got, want = logits(own, quantized), logits(own, dequantize(quantized))
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
        assert np.abs(got - logits(model, params)).max() > 1e-3 * np.abs(want).max()
    left = {name for name, leaf in _plain(quantized) if leaf.ndim > 1}
    assert not left - {'linear'}, left


def _plain(params):
    """(name of the module, leaf) of what is not quantised."""
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))[0]
    return [(path[-2].key, leaf) for path, leaf in flat if not isinstance(leaf, QuantizedArray)]


def test_scanned_layers_are_quantised_each_by_itself():
    config = DECODER.replace(num_layers=3)
    model, params = model_and_params(config)
    config = config.replace(layer_stack='scan')
    scanned, stacked = build(config), scan_params(params, config)
    own, one = quantize_model(scanned, stacked, 'int4', group=8)
    _, other = quantize_model(model, params, 'int4', group=8)
    assert own.config.layer_stack == 'unrolled'
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize('weights', ['int8', 'int8_activations', 'int4'])
def test_generate_answers_as_with_dequantised_weights(weights):
    model, params = model_and_params(TRANSLATOR)
    own, quantized = quantize_model(model, params, weights, group=8)
    config = DecodeConfig(max_new_tokens=6, beam_size=2, eos_ids=(), return_log_probs=True)
    tokens = some_tokens(3, 5)
    got = generate(own, quantized, tokens, config=config)
    want = generate(own, dequantize(quantized), tokens, config=config)
    if weights == 'int8_activations':
        assert 0 < np.abs(got.scores - want.scores).max() < 0.1 * np.abs(want.scores).max()
    else:
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_allclose(got.scores, want.scores, rtol=1e-4)


def test_an_int8_cache_holds_what_numpy_rounds():
    rng = np.random.default_rng(0)
    key, value = rng.normal(size=(2, 5, 3, 8)).astype('float32'), rng.normal(size=(2, 5, 3, 4)).astype('float32')
    key[0, 1], key[1, 2, 0, 3] = 0, 50
    stored = QuantizedKeysValues.of(jnp.asarray(key), jnp.asarray(value))
    for got, values, array in (
        (stored.key_BSKH, np.moveaxis(stored.key_BKHS, 3, 1), key),
        (stored.value_BSKH, np.moveaxis(stored.value_BKSH, 2, 1), value),
    ):
        ratio, _, scale = rounded(array, 8, (*array.shape[:3], 1))
        integers = values.astype(float)
        assert np.abs(integers - np.clip(ratio, -128, 127)).max() <= 0.5 + 1e-4
        np.testing.assert_allclose(got, integers * scale, rtol=1e-6)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) == key.size + value.size + 2 * 2 * (2 * 5 * 3)


@pytest.mark.parametrize('config', [DECODER, TRANSLATOR], ids=['decoder', 'translator'])
def test_steps_on_an_int8_cache_stay_near_those_on_a_full_one(config):
    model, params = model_and_params(config)
    own, _ = quantize_model(model, params, 'none', cache='int8')
    tokens, source = some_tokens(2, 6), some_tokens(2, 5, seed=1) if config is TRANSLATOR else None

    @functools.partial(jax.jit, static_argnums=0)
    def last(model, params):
        _, cache = prefill(model, params, tokens[:, :4], init_cache(model, 2, 8, source))
        _, cache = step(model, params, tokens[:, 4:5], cache)
        return step(model, params, tokens[:, 5:], cache)

    (got, cache), (want, _) = last(own, params), last(model, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.mixers)} == {jnp.dtype('int8'), jnp.dtype('bfloat16')}
    change = np.abs(got - want).max() / np.abs(want).max()
    assert 1e-5 < change < 0.03
    found = generate(own, params, tokens, config=DecodeConfig(max_new_tokens=5, beam_size=3, eos_ids=()))
    assert np.isfinite(found.scores).all()


def sizes(model, params, folder):
    """Compiled argument bytes of the parameters, and bytes on disk."""
    tokens = some_tokens(1, 4)
    compiled = jax.jit(lambda params: model.apply({'params': params}, tokens).logits).lower(params).compile()
    save_quantized(folder, model, params)
    return compiled.memory_analysis().argument_size_in_bytes, sum(file.stat().st_size for file in folder.iterdir())


def test_memory_and_files_are_smaller_by_the_promised_factors(tmp_path):
    """A small wide model: norms, biases and scales are counted, and int4 is two to a byte."""
    config = tiny(kind='decoder', vocab_size=4096, d_model=256, d_ff=1024, num_layers=1)
    model = build(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype('float32'), abstract_params(model)[0])
    full = sizes(model, params, tmp_path / 'full')
    for weights, factor in (('int8', 3.8), ('int4', 6.5)):
        found = sizes(*quantize_model(model, params, weights), tmp_path / weights)
        assert all(before / after >= factor for before, after in zip(full, found, strict=True)), (weights, full, found)


@pytest.mark.parametrize('weights', ['int8', 'int8_activations', 'int4'])
def test_what_is_saved_is_read_back(tmp_path, weights):
    model, params = quantize_model(*model_and_params(EXPERTS), weights, group=8)
    save_quantized(tmp_path / 'out', model, params)
    again, read = load_quantized(tmp_path / 'out')
    assert again.config == model.config
    assert jax.tree.structure(jax.tree.map(np.asarray, read)) == jax.tree.structure(jax.tree.map(np.asarray, params))
    jax.tree.map(np.testing.assert_array_equal, read, params)
    with pytest.raises(UserError, match='is not empty'):
        save_quantized(tmp_path / 'out', model, params)
    (tmp_path / 'out' / 'quantized.json').unlink()
    with pytest.raises(UserError, match='does not exist'):
        load_quantized(tmp_path / 'out')


def test_int4_is_packed_two_to_a_byte_first_in_the_lower_half():
    values = np.array([[-8, 7, 0], [3, -1, 5]]).astype(jnp.int4)
    packed = pack(values)
    assert packed.tolist() == [0x78, 0x30, 0x5F]
    for back in (unpack, jax.jit(unpack_on_device, static_argnums=1)):
        np.testing.assert_array_equal(back(packed, (2, 3)), values)
    np.testing.assert_array_equal(unpack(pack(values[:1]), (1, 3)), values[:1])


@pytest.mark.parametrize(
    'choices, words',
    [
        (dict(weights='int9'), "weights = 'int9' is unknown"),
        (dict(weights='int8', cache='int4'), "cache = 'int4' is unknown"),
        (dict(weights='int4'), "groups of 32 do not divide the 16 inputs of 'decoder"),
        (dict(weights='int4', group=12), 'groups of 4 do'),
    ],
)
def test_bad_choices_are_refused_in_words(choices, words):
    with pytest.raises(UserError) as caught:
        quantize_model(*model_and_params(DECODER), **choices)
    assert words in str(caught.value)


def test_parameters_which_cannot_be_quantised_are_refused():
    model, params = model_and_params(DECODER)
    own, quantized = quantize_model(model, params)
    with pytest.raises(UserError, match='quantised already'):
        quantize_model(own, quantized)
    broken = jax.tree.map(lambda leaf: np.where(leaf > 0.5, np.inf, leaf), params)
    with pytest.raises(UserError, match='not finite'):
        quantize_model(model, broken)
    with pytest.raises(UserError, match='model.latent does not go with model.cache_dtype'):
        quantize_model(*model_and_params(EXPERTS), cache='int8')
