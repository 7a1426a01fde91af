"""Symbolic masks: which key a query sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from transformer_jax.ops.masks import Mask, positions_from_mask, positions_from_segments


@functools.partial(jax.jit, static_argnums=(1, 2))
def visible(mask, T, S):
    return mask.visible(T, S)


def seen(mask, T, S):
    return np.asarray(visible(mask, T, S))


def test_causal_queries_line_up_with_the_last_key():
    causal = Mask(causal=True)
    assert seen(causal, 2, 5)[0].astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen(causal, 5, 2)[0].astype(int).tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    for T, S in ((4, 4), (3, 7), (1, 6)):
        np.testing.assert_array_equal(seen(causal, T, S)[0], oracles.triangle(T, S))


def test_a_window_counts_the_token_itself():
    window = seen(Mask(causal=True) & Mask(window=3), 8, 8)[0]
    assert window.sum(1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    assert np.flatnonzero(window[7]).tolist() == [5, 6, 7]
    np.testing.assert_array_equal(seen(Mask(causal=True, window=3), 1, 8)[0], window[7:])
    two_sided = seen(Mask(window=3), 8, 8)[0]
    assert np.flatnonzero(two_sided[4]).tolist() == [2, 3, 4, 5, 6]


def test_a_window_counts_positions_and_not_slots():
    """With padding between, the three nearest real tokens are seen, as without it."""
    real = jnp.array([[1, 1, 0, 0, 1, 1, 1]], bool)
    positions = positions_from_mask(real)
    mask = Mask(causal=True, window=3, key_valid_BS=real, query_positions_BT=positions, key_positions_BS=positions)
    assert np.flatnonzero(seen(mask, 7, 7)[0, 4]).tolist() == [0, 1, 4]


def test_a_prefix_is_seen_by_all():
    mask = seen(Mask(causal=True, prefix_B=jnp.array([0, 2, 3])), 5, 5)
    for row, prefix in enumerate((0, 2, 3)):
        np.testing.assert_array_equal(mask[row], oracles.triangle(5, prefix=prefix))


def test_segments_see_their_own_and_padding_sees_nothing():
    segments = np.array([1, 1, 1, 2, 2, 0, 0])
    mask = seen(
        Mask(causal=True, query_segments_BT=jnp.array([segments]), key_segments_BS=jnp.array([segments])), 7, 7
    )[0]
    for i in range(7):
        for j in range(7):
            assert mask[i, j] == (j <= i and segments[i] == segments[j] != 0)


def test_joined_masks_are_the_conjunction_and_order_does_not_matter():
    valid = jnp.array([[1, 1, 0, 1], [0, 1, 1, 1]], bool)
    parts = [Mask(causal=True), Mask(window=2), Mask(key_valid_BS=valid), Mask(key_valid_BS=jnp.ones((2, 4), bool))]
    expected = np.logical_and.reduce([np.broadcast_to(seen(part, 4, 4), (2, 4, 4)) for part in parts])
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        joined = Mask()
        for index in order:
            joined = joined & parts[index]
        np.testing.assert_array_equal(np.broadcast_to(seen(joined, 4, 4), (2, 4, 4)), expected)
    assert Mask().visible(4, 4) is None
    assert seen(Mask(window=5) & Mask(window=2), 6, 6)[0].sum() == seen(Mask(window=2), 6, 6)[0].sum()


def test_masks_which_cannot_be_joined_are_refused():
    with pytest.raises(ValueError, match='cannot be joined'):
        Mask(prefix_B=jnp.array([1])) & Mask(prefix_B=jnp.array([2]))


def test_rows_of_a_block_are_the_rows_of_the_whole():
    segments = jnp.array([[1, 1, 2, 2, 2, 3]])
    mask = Mask(causal=True, window=2, query_segments_BT=segments, key_segments_BS=segments)
    np.testing.assert_array_equal(np.asarray(mask.visible(6, 6, jnp.array([2, 5, 3]))), seen(mask, 6, 6)[:, [2, 5, 3]])


def test_positions_count_real_tokens_on_either_side_and_restart_with_segments():
    real = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert np.asarray(positions_from_mask(real)).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    segments = np.array([[1, 1, 1, 2, 2, 0, 0], [3, 1, 1, 4, 0, 0, 0]])
    expected = [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]]
    assert np.asarray(positions_from_segments(segments)).tolist() == expected
