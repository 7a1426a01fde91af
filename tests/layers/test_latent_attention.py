"""Latent attention against numpy, its absorbed form against the plain one, and its cache against the full pass."""

import jax
import numpy as np
import pytest
from tiny_models import by_name, equations, model_and_params, some_tokens, tiny

from transformer_jax.config import ModelConfig
from transformer_jax.decoding.cache_api import gather_beams, init_cache
from transformer_jax.errors import UserError
from transformer_jax.models import build
from transformer_jax.subconfigs import LatentConfig, RopeScaling

N, C, P, V, R = 3, 5, 4, 7, 6
CHOICES = dict(
    kind='decoder', position='rope', norm='rms', norm_position='pre', num_heads=N, d_k=C + P, d_v=V,
    rope_layout='interleaved', qkv_bias=True, out_bias=True, num_layers=2,
)  # fmt: skip
TOKENS = some_tokens(3, 6)
MASK = np.array([[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def config(query_rank=None, form='auto', **choices):
    return tiny(**CHOICES | choices, latent=LatentConfig(R, query_rank, P, form))


def rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def turn(x, position):
    """Pairs (2i, 2i + 1) as complex numbers times e^(i p f)."""
    f = 10000.0 ** (-np.arange(0, P, 2) / P)
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * position * f)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def oracle(x, p, query_rank):
    """DeepSeek-V2 2024, appendix C, head by head for one sequence T x D without padding."""
    T = len(x)
    if query_rank is None:
        query = np.einsum('td,dnh->tnh', x, p['query']['kernel'])
    else:
        down = rms(x @ p['query_down']['kernel'] + p['query_down']['bias'], p['query_norm']['scale'])
        query = np.einsum('tr,rnh->tnh', down, p['query_up']['kernel'])
    down = x @ p['down']['kernel'] + p['down']['bias']
    latent, rotary = rms(down[:, :R], p['latent_norm']['scale']), down[:, R:]
    rotary = np.stack([turn(rotary[t], t) for t in range(T)])
    y, weights = np.zeros((T, x.shape[1])), np.zeros((N, T, T))
    for n in range(N):
        key, value = latent @ p['up']['kernel'][:, n, :C], latent @ p['up']['kernel'][:, n, C:]
        for t in range(T):
            scores = key[: t + 1] @ query[t, n, :C] + rotary[: t + 1] @ turn(query[t, n, C:], t)
            e = np.exp(scores / np.sqrt(C + P))
            weights[n, t, : t + 1] = e / e.sum()
            y[t] += weights[n, t, : t + 1] @ value[: t + 1] @ p['out']['kernel'][n]
    return y + p['out']['bias'], weights


@pytest.mark.parametrize('query_rank', [None, 8])
@pytest.mark.parametrize('form', ['plain', 'absorbed'])
def test_both_forms_are_the_papers_function(query_rank, form):
    own = config(query_rank, form, num_layers=1, final_norm=False)
    model, params = model_and_params(own)
    p = by_name(params, own)['decoder']['layers_0']
    run = jax.jit(lambda p: model.apply({'params': p}, TOKENS[:1], return_hiddens=True, return_attentions=True))
    out = run(params)
    x = rms(np.asarray(out.hiddens[0][0]), p['attention_residual']['in_norm']['scale'])
    y, weights = oracle(x, p['attention'], query_rank)
    np.testing.assert_allclose(out.attentions[0][0], weights, atol=2e-6)
    middle = np.asarray(out.hiddens[0][0]) + y
    ffn = rms(middle, p['ffn_residual']['in_norm']['scale'])
    ffn = np.maximum(ffn @ p['ffn']['up']['kernel'] + p['ffn']['up']['bias'], 0)
    expected = middle + ffn @ p['ffn']['down']['kernel'] + p['ffn']['down']['bias']
    np.testing.assert_allclose(out.hidden[0], expected, atol=2e-5)


def through_the_cache(model, params, chunks):
    read = jax.jit(lambda tokens, mask, cache: model.apply({'params': params}, tokens, mask=mask, cache=cache))
    cache, start, pieces = init_cache(model, 3, 8), 0, []
    for size in chunks:
        part = slice(start, start + size)
        out = read(TOKENS[:, part], MASK[:, part], cache)
        pieces.append(np.asarray(out.logits))
        cache, start = out.cache, start + size
    return np.concatenate(pieces, axis=1), cache


@pytest.mark.parametrize('scaling', [None, RopeScaling('yarn', 4.0, 16, mscale=0.7, mscale_all_dim=1.0)])
def test_the_cache_of_latents_gives_the_full_pass_and_holds_rank_and_rotary_numbers_a_token(scaling):
    plain, params = model_and_params(config(8, 'plain', rope_scaling=scaling))
    absorbed = build(config(8, 'absorbed', rope_scaling=scaling))
    whole = np.asarray(jax.jit(lambda p: plain.apply({'params': p}, TOKENS, mask=MASK).logits)(params))
    for model in (plain, absorbed):
        ours, cache = through_the_cache(model, params, (3, 3))
        np.testing.assert_allclose(ours[MASK == 1], whole[MASK == 1], atol=2e-5 * np.abs(whole).max())
    assert {leaf.shape for leaf in jax.tree.leaves(cache.mixers)} == {(3, 8, R + P)}
    turned = gather_beams(cache, np.array([2, 2, 0]))
    np.testing.assert_array_equal(turned.mixers[1].latent_BSR[2], cache.mixers[1].latent_BSR[0])


def expansions(model, params, T, capacity):
    """Products whose result is as large as the keys and values of all slots."""
    cache = jax.eval_shape(lambda: init_cache(model, 1, capacity))
    jaxpr = jax.make_jaxpr(lambda cache: model.apply({'params': params}, TOKENS[:1, :T], cache=cache).logits)(cache)
    shape = (1, capacity, N, C + V)
    return sum(e.primitive.name == 'dot_general' and e.outvars[0].aval.size == np.prod(shape) and
               C + V in e.outvars[0].aval.shape for e in equations(jaxpr.jaxpr))  # fmt: skip


def test_a_step_expands_no_cached_token():
    model, params = model_and_params(config(num_layers=1))
    forced, _ = model_and_params(config(num_layers=1, form='plain'))
    assert expansions(model, params, 1, 50) == 0
    assert expansions(forced, params, 1, 50) == 1


@pytest.mark.parametrize('wrong, message', [
    (dict(d_k=P), 'model.d_k above latent.rotary_dim = 4'),
    (dict(position='alibi'), "choose 'rope'"),
    (dict(num_kv_heads=1), 'num_kv_heads'),
    (dict(kind='encoder_decoder'), 'encoder_decoder'),
    (dict(layer_pattern=('local',), window=3), "'local' layers"),
])  # fmt: skip
def test_choices_which_latent_attention_has_not_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        config(**wrong)


def test_a_latent_config_survives_json():
    assert ModelConfig.from_dict(config(8).to_dict()) == config(8)
