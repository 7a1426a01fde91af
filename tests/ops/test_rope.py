"""Rotary positions and their stretchings."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from transformer_jax.config import RopeScaling
from transformer_jax.ops import rope

RNG = np.random.default_rng(0)
rotate = jax.jit(rope.rotate, static_argnames='layout')


@pytest.mark.parametrize('layout', ['half', 'interleaved'])
@pytest.mark.parametrize('width', [8, 4])
def test_rotation_is_a_product_of_complex_numbers(layout, width):
    """`width` of 8 features are turned, the rest pass."""
    x, places = RNG.normal(size=(2, 5, 3, 8)).astype(np.float32), np.array([[0, 1, 2, 9, 30], [4, 4, 0, 1, 100]])
    table, magnitude = rope.frequencies(width, 10000.0)
    ours = np.asarray(rotate(jnp.asarray(x), jnp.asarray(places), table, magnitude, layout=layout))
    for row in range(2):
        expected = oracles.rope(x[row], places[row], oracles.rope_frequencies(width), layout)
        np.testing.assert_allclose(ours[row], expected, atol=2e-5)
    np.testing.assert_array_equal(ours[..., width:], x[..., width:])


def test_layouts_are_one_rotation_under_a_permutation_of_features():
    x = RNG.normal(size=(1, 4, 2, 8)).astype(np.float32)
    pairs_to_halves = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
    table, _ = rope.frequencies(8, 10000.0)
    places = jnp.arange(4)[None]
    interleaved = np.asarray(rotate(jnp.asarray(x), places, table, 1.0, layout='interleaved'))
    half = np.asarray(rotate(jnp.asarray(x[..., pairs_to_halves]), places, table, 1.0, layout='half'))
    np.testing.assert_allclose(half, interleaved[..., pairs_to_halves], atol=1e-6)
    assert np.abs(half - interleaved).max() > 0.1


def test_scores_depend_on_distances_alone():
    query, key = RNG.normal(size=(2, 1, 1, 1, 32)).astype(np.float32)
    table, _ = rope.frequencies(32, 10000.0)

    def score(i, j):
        turned = [rotate(x, jnp.array([[p]]), table, 1.0, layout='half') for x, p in ((query, i), (key, j))]
        return float((turned[0] * turned[1]).sum())

    np.testing.assert_allclose(score(7, 3), score(1004, 1000), atol=2e-3)
    assert abs(score(7, 3) - score(7, 5)) > 0.1


def test_angles_are_fp32_whatever_the_operands_are():
    """16-bit angles would be wrong by a radian at position 1857; a bf16 vector loses its own rounding only."""
    places = jnp.arange(4097)[None]
    table, _ = rope.frequencies(32, 10000.0)
    one = jnp.zeros((1, 4097, 1, 32), jnp.bfloat16).at[..., :16].set(1)
    turned = np.asarray(rotate(one, places, table, 1.0, layout='half'))[0, :, 0]
    assert turned.dtype == jnp.bfloat16
    exact = np.arange(4097)[:, None] * oracles.rope_frequencies(32)
    np.testing.assert_allclose(exact[1857, 1], 1044.2678, atol=1e-4)
    turned = turned.astype(np.float64)
    assert np.abs(turned[:, :16] - np.cos(exact)).max() < 2**-9 + 1e-3
    assert np.abs(turned[:, 16:] - np.sin(exact)).max() < 2**-9 + 1e-3


def test_yarn_is_the_released_ramp_and_a_stated_magnitude_is_final():
    ours, _ = rope.frequencies(64, 10000.0, RopeScaling('yarn', 4.0, 2048))
    np.testing.assert_allclose(ours, oracles.yarn_frequencies(64, 10000.0, 4.0, 2048), rtol=1e-12)
    np.testing.assert_allclose(ours[0], 1.0)
    np.testing.assert_allclose(ours[-1], oracles.rope_frequencies(64)[-1] / 4)

    def magnitude(factor, **choices):
        return rope.frequencies(64, 10000.0, RopeScaling('yarn', factor, 2048, **choices))[1]

    np.testing.assert_allclose(magnitude(64.0), 1.4158883083359672)
    np.testing.assert_allclose(magnitude(128.0), 1.4852030263919618)
    assert magnitude(64.0, attention_factor=1.0) == 1.0
    assert magnitude(16.0, mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert magnitude(1.0) == 1.0


def test_linear_ntk_and_llama3_are_their_papers():
    plain = oracles.rope_frequencies(64)
    np.testing.assert_allclose(rope.frequencies(64, 10000.0, RopeScaling('linear', 4.0))[0], plain / 4)
    stretched = oracles.rope_frequencies(64, 10000.0 * 4 ** (64 / 62))
    np.testing.assert_allclose(rope.frequencies(64, 10000.0, RopeScaling('ntk', 4.0))[0], stretched)
    # The slowest pair of NTK scaling turns as slowly as under linear scaling, the fastest as before.
    np.testing.assert_allclose(stretched[[0, -1]], [plain[0], plain[-1] / 4])
    llama = RopeScaling('llama3', 8.0, 8192, low_frequency_factor=1.0, high_frequency_factor=4.0)
    expected = oracles.llama3_frequencies(128, 500000.0, 8.0, 8192, 1.0, 4.0)
    np.testing.assert_allclose(rope.frequencies(128, 500000.0, llama)[0], expected, rtol=1e-12)


def test_dynamic_scaling_is_plain_up_to_the_trained_length_and_grows_after():
    scaling = RopeScaling('dynamic', 2.0, 100)
    ours = np.asarray(rope.dynamic_frequencies(32, 10000.0, scaling, jnp.array([7, 100, 250])))
    for row, length in enumerate((100, 100, 250)):
        base = 10000.0 * (2.0 * length / 100 - 1.0) ** (32 / 30)
        np.testing.assert_allclose(ours[row], oracles.rope_frequencies(32, base), rtol=1e-4)
    assert ours[2, -1] < 0.3 * ours[1, -1]
