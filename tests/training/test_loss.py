"""The loss is a sum and a weight, right for smoothing, padding and its own gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.training.loss import accuracy, cross_entropy, mean


def oracle(logits, labels, weights, smoothing, z_loss=0.0):
    logits = np.asarray(logits, np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    vocab = logits.shape[-1]
    target = np.full(logits.shape, smoothing / vocab)
    np.put_along_axis(target, labels[..., None], 1 - smoothing + smoothing / vocab, -1)
    losses = log_z - (target * logits).sum(-1) + z_loss * log_z**2
    return (losses * weights).sum(), weights.sum()


def test_padding_changes_neither_sum_nor_weight():
    one = cross_entropy(jnp.zeros((1, 1, 2)), jnp.array([[0]]), jnp.ones((1, 1)))
    two = cross_entropy(jnp.zeros((1, 2, 2)), jnp.array([[0, 1]]), jnp.array([[1.0, 0.0]]))
    assert mean(*one) == pytest.approx(0.693147, abs=1e-6)
    assert mean(*two) == pytest.approx(0.693147, abs=1e-6)
    assert one[1] == two[1] == 1


@pytest.mark.parametrize('wild', [[9e9, -3, 4, 1], [np.inf, 0, 0, 0], [np.nan, 0, 0, 0]])
def test_smoothed_loss_ignores_padding_with_wild_logits(wild):
    logits = jnp.array([[[2.0, 0, 0, 0], wild]])
    labels, weights = jnp.array([[0, -100]]), jnp.array([[1.0, 0.0]])
    value, slope = jax.value_and_grad(lambda x: mean(*cross_entropy(x, labels, weights, 0.1)))(logits)
    assert value == pytest.approx(0.490753, abs=1e-6)
    assert np.all(slope[0, 1] == 0) and np.all(np.isfinite(slope))


def test_lowest_reachable_smoothed_loss_is_the_entropy_of_the_target():
    logits = jnp.log(jnp.array([[[0.925, 0.025, 0.025, 0.025]]]))
    total, weight = cross_entropy(logits, jnp.array([[0]]), jnp.ones((1, 1)), 0.1)
    assert total / weight == pytest.approx(0.348780, abs=1e-6)


def test_a_class_which_takes_no_mass_may_have_no_probability():
    logits = jnp.array([[[1.0, -jnp.inf, 0.0]]])
    value, slope = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([[0]]), jnp.ones((1, 1)))[0])(logits)
    assert np.isfinite(value) and np.all(np.isfinite(slope))


@pytest.mark.parametrize('smoothing,z_loss', [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)])
def test_value_and_gradient_equal_numpy_and_finite_differences(smoothing, z_loss):
    random = np.random.default_rng(0)
    logits = random.normal(size=(2, 3, 5)).astype(np.float32) * 3
    labels, weights = random.integers(0, 5, (2, 3)), np.array([[1, 0, 1], [0.5, 1, 0]], np.float32)
    total, weight = cross_entropy(logits, jnp.asarray(labels), jnp.asarray(weights), smoothing, z_loss)
    wanted = oracle(logits, labels, weights, smoothing, z_loss)
    np.testing.assert_allclose([total, weight], wanted, rtol=1e-5)
    slope = jax.grad(lambda x: cross_entropy(x, jnp.asarray(labels), jnp.asarray(weights), smoothing, z_loss)[0])(
        logits
    )
    numeric = np.zeros(logits.shape)
    for index in np.ndindex(*logits.shape):
        shift = np.zeros(logits.shape)
        shift[index] = 1e-4
        up, down = (oracle(logits + s * shift, labels, weights, smoothing, z_loss)[0] for s in (1, -1))
        numeric[index] = (up - down) / 2e-4
    np.testing.assert_allclose(slope, numeric, atol=1e-5)


def test_accuracy_counts_weighted_hits():
    logits = jnp.eye(3)[None]
    hits, weight = accuracy(logits, jnp.array([[0, 2, 2]]), jnp.array([[1.0, 1.0, 0.0]]))
    assert (hits, weight) == (1, 2)


def test_logits_of_bfloat16_are_summed_in_float32():
    logits = jnp.full((1, 1, 4096), 3.0, jnp.bfloat16)
    total, _ = cross_entropy(logits, jnp.array([[7]]), jnp.ones((1, 1)), 0.1)
    assert total.dtype == jnp.float32
    assert total == pytest.approx(np.log(4096), rel=1e-5)
