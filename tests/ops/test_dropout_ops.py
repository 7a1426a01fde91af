"""Dropout's own random bits: rate, mean, independence, gradient, and sameness on any number of devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.ops import dropout as ops

dropout = jax.jit(ops.dropout, static_argnums=1)

# The chi-square value of one degree of freedom which chance passes once in 100 000 tries.
CHI_SQUARE_1E5 = 19.5


def kept(key, rate=0.1, shape=(256, 512)):
    return np.asarray(dropout(jnp.ones(shape), rate, key)) > 0


def dependence(a, b):
    """Pearson's chi-square of the 2 x 2 table of two boolean arrays."""
    table = np.array([[(a & b).sum(), (a & ~b).sum()], [(~a & b).sum(), (~a & ~b).sum()]], float)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return ((table - expected) ** 2 / expected).sum()


@pytest.mark.parametrize('rate', [0.1, 0.5])
def test_the_share_of_zeros_is_the_rate_and_the_mean_stays(rate):
    masks = [kept(jax.random.key(seed), rate) for seed in range(4)]
    sigma = np.sqrt(rate * (1 - rate) / masks[0].size)
    for mask in masks:
        assert abs(mask.mean() - (1 - rate)) < 4.5 * sigma
        # No row and no column is favoured.
        for axis in (0, 1):
            spread = mask.mean(axis).std() / np.sqrt(rate * (1 - rate) / mask.shape[axis])
            assert 0.85 < spread < 1.15
    x = jax.random.normal(jax.random.key(9), (256, 512)) + 3
    mean = np.mean([np.asarray(dropout(x, rate, jax.random.key(seed))) for seed in range(4)])
    assert abs(mean / float(x.mean()) - 1) < 5 * sigma / (1 - rate)


def test_neighbours_keys_and_layers_are_independent():
    key, rate = jax.random.key(0), 0.1
    mask = kept(key, rate)
    for rows, columns in ((0, 1), (1, 0), (1, 1), (0, 2), (0, 16), (4, 0), (128, 0), (0, 256)):
        near, far = mask[: 256 - rows, : 512 - columns], mask[rows:, columns:]
        assert dependence(near, far) < CHI_SQUARE_1E5, (rows, columns)
    keys = [key, jax.random.key(1), *jax.random.split(key, 3)]
    masks = [kept(k, rate) for k in keys]
    for one, other in itertools.combinations(masks, 2):
        assert dependence(one, other) < CHI_SQUARE_1E5
        assert dependence(one[:, 1:], other[:, :-1]) < CHI_SQUARE_1E5
    np.testing.assert_array_equal(kept(key, rate), mask)


def test_every_bit_of_a_word_is_a_fair_coin_and_independent_of_the_others():
    words = np.asarray(jax.jit(lambda key: ops.random_words(key, ops.numbers((1 << 16,))))(jax.random.key(4)))
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / 256
    correlation = np.corrcoef(bits.T) - np.eye(32)
    assert np.abs(correlation).max() < 5 / 256
    assert len(np.unique(words)) > 0.999 * len(words)


def test_the_gradient_is_the_mask():
    x = jax.random.normal(jax.random.key(1), (64, 32))
    y, gradient = jax.jit(jax.value_and_grad(lambda x: dropout(x, 0.3, jax.random.key(2)).sum()))(x)
    mask = kept(jax.random.key(2), 0.3, (64, 32))
    np.testing.assert_allclose(np.asarray(gradient), mask / 0.7, rtol=1e-6)
    np.testing.assert_allclose(float(y), (np.asarray(x) * mask / 0.7).sum(), rtol=1e-4)


def test_kept_elements_of_bf16_are_divided_by_the_exact_rate():
    """0.9 has no short binary inverse: rounded to bf16 first it would bias every layer by 0.16 percent."""
    x = jnp.linspace(1, 2, 128).astype(jnp.bfloat16)
    y = np.asarray(dropout(x, 0.1, jax.random.key(0)))
    expected = np.asarray((np.asarray(x).astype(np.float64) / 0.9).astype(jnp.bfloat16))
    np.testing.assert_array_equal(y[y != 0], expected[y != 0])
    assert y.dtype == jnp.bfloat16


def test_masks_are_the_same_however_the_array_is_sharded():
    key, shape = jax.random.key(7), (16, 24)
    one = kept(key, 0.5, shape)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('a', 'b'))
    for spec in (PartitionSpec('a', 'b'), PartitionSpec(('a', 'b'), None), PartitionSpec(None, 'b')):
        sharding = NamedSharding(mesh, spec)
        x = jax.device_put(jnp.ones(shape), sharding)
        y = jax.jit(lambda x: dropout(x, 0.5, key), out_shardings=sharding)(x)
        assert len(y.sharding.device_set) == 8
        np.testing.assert_array_equal(np.asarray(y) > 0, one)
