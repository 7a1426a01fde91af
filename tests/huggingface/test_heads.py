"""Pooling, the layer before the logits, a classifier, and a first layer without a norm."""

import jax
import numpy as np
import pytest
from tiny_models import by_name, equations, model_and_params, some_tokens, tiny

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.models import build, scan_params, unroll_params

ENCODER = dict(kind='encoder', position='learned', norm_bias=False, num_layers=5, layer_stack='unrolled')
LOCAL = dict(layer_pattern=('global', 'local'), window=3, num_layers=7, norm_position='pre')


def run(model, params, tokens, mask, **flags):
    return jax.jit(lambda p, t, m: model.apply({'params': p}, t, mask=m, **flags))(params, tokens, mask)


def normed(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize('pooling', ['first', 'mean'])
def test_classes_are_a_linear_map_of_the_activated_pooled_state_on_either_side_of_padding(pooling):
    config = tiny(**ENCODER, head='classes', num_classes=3, pooling=pooling, head_activation='tanh')
    model, params = model_and_params(config)
    tokens, mask = some_tokens(2, 6), np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    out = run(model, params, tokens, mask)
    p = by_name(params, config)
    rows = [np.asarray(out.hidden)[b][mask[b] == 1] for b in range(2)]
    pooled = np.stack([row[0] if pooling == 'first' else row.mean(0) for row in rows])
    expected = np.tanh(pooled @ p['head_layer']['dense']['kernel'] + p['head_layer']['dense']['bias'])
    np.testing.assert_allclose(out.pooled, expected, atol=1e-5)
    logits = expected @ p['head']['output']['kernel'] + p['head']['output']['bias']
    np.testing.assert_allclose(out.logits, logits, atol=1e-5)


def test_the_layer_before_tied_logits_is_norm_of_activation():
    config = tiny(**ENCODER, head_activation='relu', head_norm=True, head_bias=False, logits_bias=True)
    model, params = model_and_params(config)
    out = run(model, params, some_tokens(1, 5), None)
    p = by_name(params, config)
    x = np.maximum(np.asarray(out.hidden) @ p['head_layer']['dense']['kernel'], 0)
    x = normed(x, p['head_layer']['norm']['scale'])
    np.testing.assert_allclose(out.logits, x @ p['embedding']['embedding'].T + p['head']['bias'], atol=1e-4)
    again = model.apply({'params': params}, out.hidden, method='logits')
    np.testing.assert_allclose(again, out.logits, atol=1e-5)


def test_a_first_layer_without_norm_is_an_unrolled_prefix_of_whole_periods():
    config = tiny(**ENCODER | LOCAL, first_norm=False, embedding_norm=True)
    loop, params = model_and_params(config)
    scan = build(config.replace(layer_stack='scan'))
    stacked = scan_params(params, scan.config)
    assert sorted(stacked['encoder']) == ['final_norm', 'layers', 'layers_0', 'layers_1', 'layers_6']
    assert 'in_norm' not in params['encoder']['layers_0'].get('attention_residual', {})
    jax.tree.map(np.testing.assert_array_equal, unroll_params(stacked, scan.config), params)
    tokens = some_tokens(2, 7)

    def apply(model):
        return lambda p: model.apply({'params': p}, tokens).logits

    count = [
        sum(equation.primitive.name == 'dot_general' for equation in equations(jax.make_jaxpr(apply(m))(p).jaxpr))
        for m, p in ((loop, params), (scan, stacked))
    ]
    assert count[1] < count[0]
    np.testing.assert_allclose(jax.jit(apply(loop))(params), jax.jit(apply(scan))(stacked), atol=2e-5)
    x = normed(params['embedding']['embedding'][tokens] * 4 + params['embedder']['position']['embedding'][:7],
               params['embedder']['norm']['scale'])  # fmt: skip
    out = run(loop, params, tokens, None, return_attentions=True, return_hiddens=True)
    np.testing.assert_allclose(out.hiddens[0], x, atol=1e-5)
    query, key = (np.einsum('btd,dnh->bnth', x, params['encoder']['layers_0']['attention'][n]['kernel'])
                  for n in ('query', 'key'))  # fmt: skip
    scores = np.exp(np.einsum('bnth,bnsh->bnts', query, key) / 2)
    np.testing.assert_allclose(out.attentions[0], scores / scores.sum(-1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize('wrong', [
    dict(kind='decoder', position='none', pooling='first', head='none'),
    dict(kind='encoder', pooling='first'),
    dict(kind='encoder', head='classes', pooling='first'),
    dict(kind='encoder', head='classes', num_classes=3),
    dict(kind='encoder', num_classes=3),
    dict(kind='encoder', head_norm=True),
    dict(head_activation='gelu'),
    dict(first_norm=False),
])  # fmt: skip
def test_heads_which_cannot_be_are_refused_when_the_config_is_built(wrong):
    with pytest.raises(UserError, match='model.'):
        ModelConfig(**wrong)
