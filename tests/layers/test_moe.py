"""A mixture of experts inside models, against numpy, one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import model_and_params, some_tokens, tiny

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.layers.moe import MixtureOfExperts
from transformer_jax.models import build, scan_params, unroll_params
from transformer_jax.subconfigs import MixtureConfig
from transformer_jax.training.flops import matrix_product_flops

CHOICES = dict(kind='decoder', position='rope', norm='rms', norm_position='pre', ffn='gated_silu', ffn_bias=False)
DEEPSEEK = MixtureConfig(
    6, 2, d_ff=5, shared_experts=2, affinity='sigmoid', correction_bias=True, groups=3, groups_per_token=2,
    group_score='top_two', scale=2.5, dense_layers=1, balance_loss=0.1, z_loss=0.01,
)  # fmt: skip


def silu(x):
    return x / (1 + np.exp(-x))


def layer(mixture, seed=0, **choices):
    """The layer by itself with random parameters: (module, parameters)."""
    module = MixtureOfExperts(tiny(**CHOICES | choices, mixture=mixture))
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 1, 16)), None, True))['params']
    rng = np.random.default_rng(seed)
    fill = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype) * 0.5, shapes)
    return module, jax.tree.map(lambda box: box.value, fill, is_leaf=lambda leaf: hasattr(leaf, 'value'))


def run(module, params, x, real):
    return jax.jit(lambda p, x, real: module.apply({'params': p}, x, real, True))(params, x, real)


def one_token(x, p, experts, weights, gated=True):
    """sum_i g_i W_down(act(W_gate x) * (W_up x)), each expert by itself."""
    y = np.zeros_like(x)
    for expert, weight in zip(experts, weights, strict=True):
        up = x @ p['experts_up']['kernel'][expert]
        hidden = silu(x @ p['experts_gate']['kernel'][expert]) * up if gated else np.maximum(up, 0)
        y += weight * (hidden @ p['experts_down']['kernel'][expert])
    return y


def top(x, p, k):
    """Mixtral's rule: the k best of a softmax, whose weights sum to 1."""
    logits = x @ p['router']['linear']['kernel']
    experts = np.argsort(-logits, kind='stable')[:k]
    weights = np.exp(logits[experts] - logits[experts].max())
    return experts, weights / weights.sum()


@pytest.mark.parametrize('dispatch', ['dropless', 'capacity'])
@pytest.mark.parametrize('ffn', ['gated_silu', 'relu'])
def test_a_token_gets_the_weighed_sum_of_its_experts_and_padding_gets_nothing(dispatch, ffn):
    # Six slots for each expert: as many as there are tokens, so that none is dropped.
    module, params = layer(MixtureConfig(3, 2, d_ff=7, dispatch=dispatch, capacity_factor=1.5), ffn=ffn)
    x = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
    real = np.array([[1, 1, 0], [1, 1, 1]], bool)
    y, mixture = run(module, params, x, real)
    for place in np.ndindex(2, 3):
        experts, weights = top(x[place], params, 2)
        expected = one_token(x[place], params, experts, weights, ffn == 'gated_silu') * real[place]
        np.testing.assert_allclose(y[place], expected, atol=1e-5)
    assert mixture.losses == {}


@pytest.mark.parametrize('dispatch', ['dropless', 'capacity'])
def test_padding_changes_no_number_and_no_gradient_of_real_tokens(dispatch):
    mixture = MixtureConfig(4, 2, dispatch=dispatch, capacity_factor=1.0, balance_loss=0.1, z_loss=0.1)
    module, params = layer(mixture)
    x = np.random.default_rng(1).normal(size=(1, 8, 16)).astype(np.float32)
    padded = np.concatenate([np.full((1, 8, 16), 5.0, np.float32), x], axis=1)
    real = np.arange(16)[None] >= 8
    if dispatch == 'capacity':
        # The number of slots follows the size of the batch; so that it is the same for both, half the factor.
        other, _ = layer(MixtureConfig(4, 2, dispatch=dispatch, capacity_factor=0.5, balance_loss=0.1, z_loss=0.1))
    else:
        other = module

    def loss_of(module, x, real):
        def loss(params, x):
            y, mixture = module.apply({'params': params}, x, real, True)
            return jnp.square(y).sum() + sum(total / weight for total, weight in mixture.losses.values()), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    (loss, y), (slope, slope_x) = loss_of(module, x, None)
    (padded_loss, padded_y), (padded_slope, padded_slope_x) = loss_of(other, padded, real)
    np.testing.assert_allclose(loss, padded_loss, rtol=1e-6)
    np.testing.assert_allclose(padded_y[:, 8:], y, atol=1e-6)
    assert not np.any(padded_y[:, :8]) and not np.any(padded_slope_x[:, :8])
    np.testing.assert_allclose(padded_slope_x[:, 8:], slope_x, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), slope, padded_slope)


def test_what_finds_no_slot_adds_nothing_and_has_no_gradient():
    """Top-1, one slot for each of two experts: the first token of each is kept, as in Switch."""
    module, params = layer(MixtureConfig(2, 1, dispatch='capacity', capacity_factor=0.4, normalize=False))
    x = np.random.default_rng(2).normal(size=(1, 5, 16)).astype(np.float32)
    kept, seen = [], set()
    for t in range(5):
        expert = int(top(x[0, t], params, 1)[0][0])
        kept.append(expert not in seen)
        seen.add(expert)
    assert sum(kept) == 2
    y, _ = run(module, params, x, None)
    slope = jax.jit(jax.grad(lambda x: module.apply({'params': params}, x, None, True)[0].sum()))(x)
    for t in range(5):
        assert np.any(y[0, t]) == np.any(slope[0, t]) == kept[t]


def test_the_correction_bias_of_a_layer_changes_the_choice_and_gets_no_gradient():
    module, params = layer(MixtureConfig(4, 1, affinity='sigmoid', correction_bias=True, normalize=False))
    x = np.random.default_rng(2).normal(size=(1, 5, 16)).astype(np.float32)
    params['router']['bias'] = np.array([0, 0, 9, 0], np.float32)
    y, _ = run(module, params, x, None)
    for t in range(5):
        weight = 1 / (1 + np.exp(-(x[0, t] @ params['router']['linear']['kernel'])[2]))
        np.testing.assert_allclose(y[0, t], one_token(x[0, t], params, [2], [weight]), atol=1e-5)
    slope = jax.jit(jax.grad(lambda p: module.apply({'params': p}, x, None, True)[0].sum()))(params)
    assert not np.any(slope['router']['bias']) and np.any(slope['router']['linear']['kernel'])


def test_shared_experts_see_every_token():
    mixture = MixtureConfig(4, 2, d_ff=5, shared_experts=2)
    module, params = layer(mixture)
    x = np.random.default_rng(1).normal(size=(1, 4, 16)).astype(np.float32)
    y, _ = run(module, params, x, np.array([[1, 1, 1, 0]], bool))
    shared = params['shared']
    assert shared['up']['kernel'].shape == (16, 10)
    hidden = silu(x @ shared['gate']['kernel']) * (x @ shared['up']['kernel'])
    expected = hidden @ shared['down']['kernel']
    for t in range(3):
        expected[0, t] += one_token(x[0, t], params, *top(x[0, t], params, 2))
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_dense_layers_stand_before_the_scan_and_scan_equals_loop_losses_too():
    config = tiny(**CHOICES, num_layers=4, mixture=DEEPSEEK)
    loop, params = model_and_params(config)
    assert 'router' not in params['decoder']['layers_0']['ffn'] and 'router' in params['decoder']['layers_1']['ffn']
    scan = build(config.replace(layer_stack='scan', remat='full'))
    stacked = scan_params(params, scan.config)
    assert sorted(stacked['decoder']) == ['final_norm', 'layers', 'layers_0']
    jax.tree.map(np.testing.assert_array_equal, unroll_params(stacked, scan.config), params)
    tokens, mask = some_tokens(2, 6), np.array([[1, 1, 1, 1, 0, 0], [1] * 6])

    def loss_of(model):
        def loss(params):
            out = model.apply({'params': params}, tokens, mask=mask)
            total = (jnp.square(out.logits) * mask[..., None]).sum() * 1e-3
            return total + sum(a / b for a, b in out.aux.values()), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    (value, out), slope = loss_of(loop)(params)
    (scan_value, scan_out), scan_slope = loss_of(scan)(stacked)
    np.testing.assert_allclose(value, scan_value, rtol=1e-5)
    np.testing.assert_allclose(out.logits[mask == 1], scan_out.logits[mask == 1], atol=1e-4)
    assert sorted(out.aux) == ['balance', 'router_z'] and {float(weight) for _, weight in out.aux.values()} == {10.0}
    for name in out.aux:
        np.testing.assert_allclose(out.aux[name][0], scan_out.aux[name][0], rtol=1e-5)
    back = unroll_params(scan_slope, scan.config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-3), slope, back)
    assert not np.any(slope['decoder']['layers_1']['ffn']['router']['bias'])


def test_packed_segments_and_encoder_decoders_route_no_padding():
    mixture = MixtureConfig(4, 2, balance_loss=0.1)
    model, params = model_and_params(tiny(ffn='relu', ffn_bias=False, mixture=mixture, num_layers=1))
    source, target = some_tokens(2, 5), some_tokens(2, 4, seed=1)
    segments, target_segments = np.array([[1, 1, 2, 0, 0], [1, 2, 2, 2, 0]]), np.array([[1, 2, 2, 0], [1, 1, 2, 2]])

    def run(source):
        return model.apply({'params': params}, source, target, source_segment_ids=segments,
                           target_segment_ids=target_segments)  # fmt: skip

    out, other = (jax.jit(run)(np.where(segments, source, pad)) for pad in (0, 3))
    assert {name: float(weight) for name, (_, weight) in out.aux.items()} == {'balance': 7.0, 'encoder_balance': 7.0}
    for name in out.aux:
        assert float(out.aux[name][0]) == float(other.aux[name][0]) > 0


def test_only_the_chosen_experts_are_counted_as_work():
    one, params = layer(MixtureConfig(8, 1, d_ff=12))
    two, _ = layer(MixtureConfig(8, 2, d_ff=12))
    x = jnp.zeros((2, 4, 16))
    counts = [matrix_product_flops(lambda p, m=m: m.apply({'params': p}, x, None, True)[0], params) for m in (one, two)]
    router, expert = 2 * 8 * 16 * 8, 2 * 8 * 3 * 16 * 12
    assert counts == [router + expert, router + 2 * expert]


def test_a_mixture_survives_json_and_refuses_biases():
    config = ModelConfig(**CHOICES, mixture=DEEPSEEK)
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(UserError, match="model.mixture.num_expert is unknown; did you mean 'num_experts'"):
        ModelConfig.from_dict({'mixture': {'num_expert': 4}})
    with pytest.raises(UserError, match='ffn_bias'):
        ModelConfig(mixture=MixtureConfig())
