"""The whole model against a forward pass of the paper in numpy float64, choice by choice."""

import numpy as np
import oracles
import pytest
from tiny_models import by_name, model_and_params, some_tokens, tiny

from transformer_jax.config import FFNS

pytestmark = pytest.mark.usefixtures('quick_compilation')

SOURCE, TARGET = some_tokens(3, 6), some_tokens(3, 6, seed=1)

ENCODER_DECODERS = {
    'post': {},
    'pre': dict(norm_position='pre'),
    'sandwich': dict(norm_position='sandwich', qkv_bias=True, out_bias=True),
    'res_post': dict(norm_position='res_post', tie_embeddings='inputs'),
    'deepnorm': dict(norm_position='deepnorm', num_decoder_layers=1),
    'post_with_final_norm': dict(final_norm=True, tie_embeddings='output'),
    'pre_without_final_norm': dict(norm_position='pre', final_norm=False),
    'nothing_tied': dict(tie_embeddings='none', embedding_scale='none', logits_bias=True),
    'free_head_widths': dict(num_heads=2, d_k=6, d_v=3, norm='rms', norm_position='pre', num_layers=1),
    'one_key_head': dict(num_kv_heads=1, qk_norm='full', qkv_bias=True),
    'softcaps': dict(attention_softcap=0.7, logits_softcap=1.5, attention_scale=0.9),
    'marian': dict(position='sinusoidal_halves', ffn='silu', qkv_bias=True, out_bias=True, logits_bias=True),
    'learned': dict(position='learned', position_offset=2, embedding_norm=True),
    't5': dict(
        position='relative', norm='rms', norm_position='pre', attention_scale=1.0, embedding_scale='none',
        relative_buckets=8, relative_max_distance=6, ffn_bias=False, logits_scale=16**-0.5,
    ),  # fmt: skip
    'rope': dict(position='rope', rope_layout='interleaved', norm_bias=False),
    'alibi': dict(position='alibi'),
}


def assert_close(ours, oracle):
    """Equal to 1e-5 of the largest entry."""
    np.testing.assert_allclose(np.asarray(ours), oracle, rtol=0, atol=1e-5 * max(1, np.abs(oracle).max()))


@pytest.mark.parametrize('name', ENCODER_DECODERS)
def test_encoder_decoder_is_the_paper_in_numpy(name):
    config = tiny(**ENCODER_DECODERS[name])
    model, params = model_and_params(config)
    target = TARGET[:, :4] if config.num_decoder_layers else TARGET
    out = model.apply({'params': params}, SOURCE, target, return_hiddens=True, return_attentions=True)
    for row in range(2):
        logits, between = oracles.encoder_decoder(by_name(params, config), config, SOURCE[row], target[row])
        assert_close(out.logits[row], logits)
        assert_close(out.hidden[row], between['hidden'])
        assert_close(out.encoder_hidden[row], between['encoder_hidden'])
        for field in ('attentions', 'encoder_attentions', 'cross_attentions'):
            assert_close([layer[row] for layer in getattr(out, field)], between[field])
        for field in ('hiddens', 'encoder_hiddens'):
            layers = [layer[row] for layer in getattr(out, field)]
            assert_close(layers[:-1], between[field][:-1])
            np.testing.assert_array_equal(layers[-1], getattr(out, field[:-1])[row])


LANGUAGE_MODELS = {
    'gpt2': dict(
        kind='decoder', position='learned', norm_position='pre', ffn='gelu_tanh', qkv_bias=True, out_bias=True,
        embedding_scale='none',
    ),  # fmt: skip
    'gpt_j': dict(
        kind='decoder', position='rope', rope_layout='interleaved', rope_fraction=0.5, norm_position='parallel'
    ),
    'gpt_neox': dict(kind='decoder', position='rope', norm_position='parallel_two_norms', tie_embeddings='none'),
    'bert': dict(
        kind='encoder', position='learned', token_types=2, embedding_norm=True, ffn='gelu', qkv_bias=True, out_bias=True
    ),
    'gemma2': dict(
        kind='decoder', position='rope', norm='rms_plus_one', norm_position='sandwich', num_layers=3,
        num_kv_heads=2, qk_norm='head', layer_pattern=('local', 'global'), window=2, rope_local_theta=50.0,
        attention_softcap=2.0, logits_softcap=3.0, ffn='gated_gelu_tanh',
    ),  # fmt: skip
    'deepnorm_decoder': dict(kind='decoder', norm_position='deepnorm', position='alibi'),
    'deepnorm_encoder': dict(kind='encoder', norm_position='deepnorm', position='relative'),
    'no_positions': dict(kind='decoder', position='none', norm_position='res_post'),
}


@pytest.mark.parametrize('name', LANGUAGE_MODELS)
def test_one_stack_is_its_numpy_forward(name):
    config = tiny(**LANGUAGE_MODELS[name])
    model, params = model_and_params(config)
    types = (SOURCE % 2) if config.token_types else None
    out = model.apply({'params': params}, SOURCE, token_types=types)
    for row, tokens in enumerate(SOURCE):
        expected = oracles.language_model(
            by_name(params, config), config, tokens, None if types is None else types[row]
        )
        assert_close(out.logits[row], expected)


@pytest.mark.parametrize('ffn', FFNS)
def test_every_feed_forward_kind_is_its_equation(ffn):
    config = tiny(kind='decoder', num_layers=1, ffn=ffn, norm_position='pre')
    model, params = model_and_params(config)
    expected = oracles.language_model(by_name(params, config), config, SOURCE[0])
    assert_close(model.apply({'params': params}, SOURCE).logits[0], expected)
