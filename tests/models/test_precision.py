"""bf16 compute: fp32 sums, statistics and parameters' gradients, read off the traced programs and off numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import equations, model_and_params, some_tokens, tiny

from transformer_jax.layers.linear import Linear
from transformer_jax.layers.norm import Norm
from transformer_jax.ops.attention import attention
from transformer_jax.ops.masks import Mask

SOURCE, TARGET = some_tokens(2, 6), some_tokens(2, 5, seed=1)
LOW = dict(dtype='bfloat16', qkv_bias=True, out_bias=True, dropout=0.1, attention_softcap=5.0, logits_softcap=5.0)


def loss(model):
    def total(params):
        out = model.apply(
            {'params': params}, SOURCE, TARGET, deterministic=False, rngs={'dropout': jax.random.key(0)}
        )
        return jnp.square(out.logits).mean()

    return total


@pytest.mark.parametrize('choices', [{}, dict(norm_position='sandwich', position='rope', qk_norm='full', norm='rms')])
def test_every_product_of_a_bf16_model_has_an_fp32_sum_forward_and_backward(choices):
    model, params = model_and_params(tiny(**LOW | choices))
    traced = jax.make_jaxpr(jax.grad(loss(model)))(params).jaxpr
    products = [e for e in equations(traced) if e.primitive.name == 'dot_general']
    # Two layers of each kind: 16 matrices and 6 products of attention, once forward and twice backward.
    assert len(products) >= 2 * 22 * 3
    for product in products:
        assert {str(operand.aval.dtype) for operand in product.invars} == {'bfloat16'}
        assert product.outvars[0].aval.dtype == jnp.float32


def test_statistics_and_softmax_of_a_bf16_model_are_fp32():
    model, params = model_and_params(tiny(**LOW, position='rope', norm_position='sandwich'))
    traced = jax.make_jaxpr(jax.grad(loss(model)))(params).jaxpr
    wide = {'exp', 'rsqrt', 'tanh', 'sin', 'cos', 'log', 'reduce_sum', 'reduce_max', 'cumsum', 'scatter-add'}
    found = [e for e in equations(traced) if e.primitive.name in wide and 'float' in str(e.invars[0].aval.dtype)]
    assert {'exp', 'rsqrt', 'tanh', 'sin', 'cos', 'reduce_sum'} <= {e.primitive.name for e in found}
    for equation in found:
        assert equation.invars[0].aval.dtype == jnp.float32, equation


def test_parameters_and_their_gradients_are_fp32_and_logits_too():
    model, params = model_and_params(tiny(**LOW))
    shapes = jax.eval_shape(jax.grad(loss(model)), params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((params, shapes))} == {'float32'}
    out = jax.eval_shape(lambda p: model.apply({'params': p}, SOURCE, TARGET), params)
    assert (out.logits.dtype, out.hidden.dtype) == (jnp.float32, jnp.bfloat16)
    low = tiny(**LOW, param_dtype='bfloat16')
    shapes = jax.eval_shape(jax.grad(loss(model_and_params(low)[0])), model_and_params(low)[1])
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)} == {'bfloat16'}


def test_a_bf16_model_differs_from_fp32_by_its_roundings_only():
    low, params = model_and_params(tiny(kind='decoder', dtype='bfloat16'))
    wide, _ = model_and_params(tiny(kind='decoder'))
    one, other = (np.asarray(jax.jit(m.apply)({'params': params}, SOURCE).logits, np.float64) for m in (low, wide))
    error = np.sqrt(np.square(one - other).mean() / np.square(other).mean())
    assert 0 < error < 0.02


def test_the_gradient_of_a_bias_counts_past_256():
    """A sum of 4096 ones in bf16 stops at 256, where 256 + 1 rounds back to 256."""
    module = Linear(tiny(dtype='bfloat16'), (4, 3), ('embed', 'mlp'), use_bias=True)
    x = jnp.ones((2, 2048, 4), jnp.bfloat16)
    params = {'kernel': jnp.ones((4, 3)), 'bias': jnp.zeros(3)}
    gradient = jax.grad(lambda p: module.apply({'params': p}, x).astype(jnp.float32).sum())(params)
    np.testing.assert_array_equal(np.asarray(gradient['bias']), 4096.0)
    np.testing.assert_array_equal(np.asarray(gradient['kernel']), 4096.0)


def test_a_linear_layer_rounds_once_after_its_bias():
    rng = np.random.default_rng(0)
    module = Linear(tiny(dtype='bfloat16'), (64, 8), ('embed', 'mlp'), use_bias=True)
    kernel = jnp.asarray(rng.normal(size=(64, 8)), jnp.bfloat16).astype(jnp.float32)
    low = {'kernel': kernel, 'bias': jnp.full(8, 40.25)}
    x = jnp.asarray(rng.normal(size=(5, 64)), jnp.bfloat16)
    y = np.asarray(module.apply({'params': low}, x)).astype(np.float64)
    exact = np.asarray(x).astype(np.float64) @ np.asarray(low['kernel'], np.float64) + 40.25
    assert np.abs(y - exact).max() <= 0.125 + 1e-3  # half a unit in the last place between 32 and 64


def test_norms_of_bf16_are_fp32_norms_rounded_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 300)) * 3 + 50, jnp.bfloat16)
    params = {'scale': jnp.full(300, 1.01), 'bias': jnp.full(300, 0.3)}
    ours = np.asarray(Norm(tiny()).apply({'params': params}, x)).astype(np.float64)
    wide = np.asarray(x).astype(np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True) * 1.01 + 0.3
    assert (np.abs(ours - exact) <= np.abs(exact) * 2.0**-8 + 1e-4).all()


def test_attention_scores_of_bf16_are_exact_products_scaled_in_fp32():
    """With d_k = 32 the scale has no short binary form: rounding it, or the scaled query, would show in the weights."""
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 40, 2, 32)) * 3, jnp.bfloat16) for _ in range(2))
    _, weights = attention(query, key, key, Mask(), scale=32**-0.5, return_weights=True)
    q, k = (np.asarray(x).astype(np.float64) for x in (query, key))
    scores = np.einsum('btnh,bsnh->bnts', q, k) * 32**-0.5
    exact = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(weights), exact / exact.sum(-1, keepdims=True), atol=2e-5)
