"""Sinusoids, ALiBi and T5's buckets against the papers' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from transformer_jax.ops import positions
from transformer_jax.ops.positions import alibi_bias, alibi_slopes

sinusoids = jax.jit(positions.sinusoids, static_argnums=(1, 2))
relative_bucket = jax.jit(positions.relative_bucket, static_argnames=('bidirectional', 'buckets', 'max_distance'))


@pytest.mark.parametrize('layout', ['interleaved', 'halves'])
def test_sinusoids_are_the_papers(layout):
    places = np.array([[0, 1, 2, 7], [3, 0, 511, 40]])
    ours = np.asarray(sinusoids(jnp.asarray(places), 16, layout))
    for row in range(2):
        np.testing.assert_allclose(ours[row], oracles.sinusoid(places[row], 16, layout), atol=3e-5)
    if layout == 'interleaved':
        np.testing.assert_array_equal(ours[0, 0], [0, 1] * 8)


def test_product_of_two_positions_depends_on_their_distance_alone():
    """sin a sin b + cos a cos b = cos(a - b): PE(p) and PE(p + dt) of pair i give cos(w_i dt)."""
    D, table = 32, np.asarray(sinusoids(jnp.arange(60)[None], 32))[0].reshape(60, 16, 2)
    frequencies = oracles.rope_frequencies(D)
    for distance in (0, 1, 5, 17):
        pairs = (table[: 60 - distance] * table[distance:]).sum(-1)
        expected = np.broadcast_to(np.cos(frequencies * distance), pairs.shape)
        np.testing.assert_allclose(pairs, expected, atol=1e-5)


def test_alibi_slopes_are_the_authors():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(6), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    np.testing.assert_allclose(alibi_slopes(12)[8:], [0.707107, 0.353553, 0.176777, 0.088388], atol=1e-6)
    assert alibi_slopes(1).tolist() == [2.0**-8]
    for N in (1, 2, 3, 5, 6, 8, 12, 16, 20, 112):
        np.testing.assert_allclose(alibi_slopes(N), oracles.alibi_slopes(N), rtol=1e-6)


def test_alibi_bias_falls_with_the_distance():
    bias = np.asarray(alibi_bias(jnp.array([[3, 4]]), jnp.arange(5)[None], 8))
    np.testing.assert_allclose(bias[0, 0, 1], [-2, -1.5, -1, -0.5, 0])
    np.testing.assert_allclose(bias[0, 0, 0, :4], [-1.5, -1, -0.5, 0])


@pytest.mark.parametrize('bidirectional', [True, False])
@pytest.mark.parametrize('buckets, farthest', [(32, 128), (8, 6), (16, 50)])
def test_relative_buckets_are_exact_arithmetic(bidirectional, buckets, farthest):
    distances = np.concatenate([np.arange(-140, 141), [-1000, 1000, -127, 128, 100000]])
    ours = relative_bucket(jnp.asarray(distances), bidirectional=bidirectional, buckets=buckets, max_distance=farthest)
    expected = [oracles.t5_bucket(int(d), bidirectional, buckets, farthest) for d in distances]
    np.testing.assert_array_equal(np.asarray(ours), expected)
    assert np.asarray(ours).max() == buckets - 1


def test_relative_buckets_are_the_published_ones():
    def bucket(distances, bidirectional):
        options = dict(bidirectional=bidirectional, buckets=32, max_distance=128)
        return np.asarray(relative_bucket(jnp.asarray(distances), **options)).tolist()

    near = [8, 8, 7, 6, 5, 4, 3, 2, 1, 0, 17, 18, 19, 20, 21, 22, 23, 24, 24]
    assert bucket(np.arange(-9, 10), True) == near
    assert bucket([-127, -128, -1000, 127, 128, 1000, -16, -32, -64], True) == [15, 15, 15, 31, 31, 31, 10, 12, 14]
    assert bucket([5, 0, -1, -15, -16, -127, -128, -300], False) == [0, 0, 1, 15, 16, 31, 31, 31]
