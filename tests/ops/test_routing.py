"""Routing against ten-line numpy oracles: who is picked, with what weight, what padding may change, who is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import equations

from transformer_jax.errors import UserError
from transformer_jax.ops import routing
from transformer_jax.subconfigs import MixtureConfig

LOGITS = np.random.default_rng(0).normal(size=(40, 12)).astype(np.float32) * 2
BIAS = np.random.default_rng(1).normal(size=12).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def oracle_route(logits, bias, groups, best_groups, k, scale, affinity, two, normalize):
    """DeepSeek-V3 2024, section 2.1.2, one token at a time; DeepSeek-V2 with 'max' groups and a softmax."""
    s = affinity(logits)
    grouped = (s + bias).reshape(groups, -1)
    worth = np.sort(grouped, -1)[:, -2 if two else -1 :].sum(-1)
    keep = np.argsort(-worth, kind='stable')[:best_groups]
    out = np.full(grouped.shape, -np.inf)
    out[keep] = grouped[keep]
    picked = np.argsort(-out.reshape(-1), kind='stable')[:k]
    return picked, scale * s[picked] / (s[picked].sum() if normalize else 1)


@pytest.mark.parametrize('affinity, groups, best, two, normalize, scale', [
    ('softmax', 1, 1, False, True, 1.0),
    ('softmax', 4, 2, False, False, 16.0),
    ('sigmoid', 4, 2, True, True, 2.5),
    ('sigmoid', 3, 1, True, False, 1.0),
])  # fmt: skip
def test_experts_and_weights_are_the_papers(affinity, groups, best, two, normalize, scale):
    mixture = MixtureConfig(
        12, 3, affinity=affinity, groups=groups, groups_per_token=best, group_score='top_two' if two else 'max',
        normalize=normalize, scale=scale, correction_bias=True,
    )  # fmt: skip
    routed = jax.jit(lambda x, b: routing.route(x, b, mixture))(LOGITS, BIAS)
    for row, logits in enumerate(LOGITS):
        own = sigmoid if affinity == 'sigmoid' else softmax
        experts, weights = oracle_route(logits, BIAS, groups, best, 3, scale, own, two, normalize)
        assert routed.experts_nk[row].tolist() == experts.tolist()
        np.testing.assert_allclose(routed.weights_nk[row], weights, rtol=2e-6)


@pytest.mark.parametrize('scale', [1.0, 2.5])
def test_the_correction_bias_picks_and_neither_weighs_nor_learns(scale):
    mixture = MixtureConfig(4, 2, affinity='sigmoid', correction_bias=True, scale=scale)
    logits, bias = jnp.array([[2.0, -2.0, 0.0, 1.0]]), jnp.array([0.0, 5.0, 0.0, 0.0])
    routed = routing.route(logits, bias, mixture)
    assert routed.experts_nk.tolist() == [[1, 0]]
    np.testing.assert_allclose(routed.weights_nk[0], scale * np.array([0.119203, 0.880797]), rtol=1e-5)

    def weighed(logits, bias):
        return (routing.route(logits, bias, mixture).weights_nk * jnp.array([1.0, 3.0])).sum()

    by_logits, by_bias = jax.grad(weighed, (0, 1))(logits, bias)
    assert np.abs(by_logits).max() > 0.01 and not np.any(by_bias)


def test_the_balance_loss_of_an_even_spread_is_one_whatever_the_padding():
    experts = np.arange(8)[:, None] % 4
    for pads in (0, 8, 24):
        chosen = np.concatenate([experts, np.zeros((pads, 1), int)])
        real = np.arange(8 + pads) < 8
        share = np.where(real[:, None], 0.25, np.eye(4)[0])
        routed = routing.Routing(jnp.asarray(chosen), jnp.ones((8 + pads, 1)), jnp.asarray(share, jnp.float32))
        assert float(routing.balance_loss(routed, jnp.asarray(real))) == pytest.approx(1.0, abs=1e-6)
        if pads == 8:
            assert float(routing.balance_loss(routed, jnp.ones(16, bool))) == pytest.approx(1.75, abs=1e-6)
    assert float(routing.balance_loss(routed, jnp.zeros(32, bool))) == 0


@pytest.mark.parametrize('affinity', ['softmax', 'sigmoid'])
def test_losses_are_the_papers_sums(affinity):
    mixture = MixtureConfig(12, 3, affinity=affinity)
    real = np.arange(40) % 5 != 0
    routed = routing.route(jnp.asarray(LOGITS), None, mixture)
    share = softmax(LOGITS) if affinity == 'softmax' else sigmoid(LOGITS) / sigmoid(LOGITS).sum(-1, keepdims=True)
    frequency = np.zeros(12)
    for row in np.flatnonzero(real):
        frequency[np.argsort(-LOGITS[row])[:3]] += 1 / (3 * real.sum())
    expected = 12 * (frequency * share[real].mean(0)).sum()
    np.testing.assert_allclose(routing.balance_loss(routed, jnp.asarray(real)), expected, rtol=1e-5)
    z = (np.log(np.exp(LOGITS[real].astype(np.float64)).sum(-1)) ** 2).sum()
    np.testing.assert_allclose(routing.z_loss(jnp.asarray(LOGITS), jnp.asarray(real)), z, rtol=1e-5)


def test_choices_are_sorted_by_expert_first_choices_first_and_padding_last():
    experts = np.array([[1, 0], [0, 1], [1, 2], [0, 1]])
    groups = routing.group_by_expert(jnp.where(np.array([1, 1, 0, 1], bool)[:, None], experts, 3), 3)
    # Of (token, place): first choices before second ones, each in order of tokens.
    order = [divmod(int(choice), 2) for choice in groups.order_m]
    assert order[:6] == [(1, 0), (3, 0), (0, 1), (0, 0), (1, 1), (3, 1)] and {token for token, _ in order[6:]} == {2}
    assert groups.expert_m.tolist() == [0, 0, 0, 1, 1, 1, 3, 3]
    assert groups.rank_m.tolist()[:6] == [0, 1, 2, 0, 1, 2]
    assert groups.sizes_E.tolist() == [3, 3, 0]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_grouped_products_are_one_product_for_each_row_and_nothing_past_the_groups(dtype):
    rng = np.random.default_rng(3)
    x, kernel = rng.normal(size=(9, 5)), rng.normal(size=(4, 5, 6))
    sizes, of_row = np.array([3, 0, 2, 1]), [0, 0, 0, 2, 2, 3]
    x, kernel = jnp.asarray(x, dtype), jnp.asarray(kernel, jnp.float32)
    # What lies past the groups may be anything.
    x = x.at[7].set(jnp.nan)

    def run(x, kernel):
        y = routing.grouped_product(x, kernel, jnp.asarray(sizes))
        return (y.astype(jnp.float32) ** 2).sum(), y

    (_, y), gradients = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(x, kernel)
    wide, rounded = np.asarray(x, np.float64), np.asarray(kernel.astype(dtype), np.float64)
    expected = np.zeros((9, 6))
    slope_x, slope_kernel = np.zeros((9, 5)), np.zeros((4, 5, 6))
    for row, expert in enumerate(of_row):
        expected[row] = wide[row] @ rounded[expert]
        slope_x[row] = 2 * rounded[expert] @ expected[row]
        slope_kernel[expert] += 2 * np.outer(wide[row], expected[row])
    assert y.dtype == dtype and gradients[0].dtype == dtype and gradients[1].dtype == jnp.float32
    close = dict(rtol=1e-5, atol=1e-5) if dtype == 'float32' else dict(rtol=0.02, atol=0.1)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, **close)
    np.testing.assert_allclose(gradients[0].astype(jnp.float32), slope_x, **close)
    np.testing.assert_allclose(gradients[1], slope_kernel, **close)
    if dtype == 'bfloat16':
        products = [e for e in equations(jax.make_jaxpr(run)(x, kernel).jaxpr) if e.primitive.name.startswith('ragged')]
        assert products and all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars[:2])


@pytest.mark.parametrize('wrong, message', [
    (dict(groups=3), 'groups must'),
    (dict(experts_per_token=9), 'it must be 1 to 8'),
    (dict(groups=4, groups_per_token=1, experts_per_token=3), 'it must be 1 to 2'),
    (dict(groups=8, groups_per_token=2, group_score='top_two'), 'two experts in each'),
    (dict(affinity='sigmod'), "did you mean 'sigmoid'"),
    (dict(capacity_factor=0), 'above 0'),
])  # fmt: skip
def test_mixtures_which_cannot_be_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        MixtureConfig(**wrong)
