"""ModelConfig and presets: bad choices are one line with the nearest valid name; plain data and back."""

import json

import pytest

from transformer_jax import ModelConfig
from transformer_jax.config import RopeScaling
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.presets import PRESETS, preset


@pytest.mark.parametrize('choices, message', [
    (dict(kind='decodr'), "model.kind = 'decodr' is unknown; did you mean 'decoder'?"),
    (dict(norm_position='sandwhich'), "did you mean 'sandwich'?"),
    (dict(position='rotary'), "model.position = 'rotary' is unknown"),
    (dict(ffn='gated_swish'), "model.ffn = 'gated_swish' is unknown; did you mean 'gated_"),
    (dict(qk_norm='xyz'), 'choose from full, head, none'),
    (dict(dtype='float16'), "did you mean 'bfloat16'?"),
    (dict(tie_embeddings='outputs'), "did you mean 'output'?"),
    (dict(remat='dot'), "did you mean 'dots'?"),
    (dict(layer_stack='unroled'), "did you mean 'unrolled'?"),
    (dict(layer_pattern=('global', 'locl')), "did you mean 'local'?"),
    (dict(num_heads=7), 'model.num_heads = 7 does not divide model.d_model = 512; the nearest that does is 8, or set'),
    (dict(num_kv_heads=3), 'num_kv_heads = 3 does not divide model.num_heads = 8; the nearest that does is 2'),
    (dict(num_heads=6, num_kv_heads=4, d_k=64), 'the nearest that does is 3'),
    (dict(num_heads=0), 'model.num_heads = 0; it must be a whole number of at least 1'),
    (dict(num_layers=-1), 'model.num_layers = -1'),
    (dict(vocab_size=3.5), 'model.vocab_size = 3.5'),
    (dict(dropout=1.0), 'model.dropout = 1.0; it must be at least 0 and below 1'),
    (dict(attention_dropout=-0.1), 'model.attention_dropout = -0.1'),
    (dict(position='learned'), "model.position = 'learned' needs model.max_positions"),
    (dict(layer_pattern=('local',)), 'need model.window'),
    (dict(window=4), "no 'local' layer, so it would do nothing"),
    (dict(position='rope', d_k=5), '5 features would be rotated; choose an even d_k'),
    (dict(d_model=9, num_heads=3), 'sinusoidal positions need an even model.d_model, not 9'),
    (dict(rope_scaling=RopeScaling('linear', 2.0)), "model.rope_scaling needs model.position = 'rope'"),
    (dict(norm_position='parallel'), 'has no place for cross-attention'),
    (dict(kind='decoder', num_decoder_layers=2), "needs kind 'encoder_decoder', not 'decoder'; use num_layers"),
])  # fmt: skip
def test_a_bad_choice_is_one_line_saying_what_would_be_right(choices, message):
    for make in (lambda: ModelConfig(**choices), lambda: ModelConfig().replace(**choices)):
        with pytest.raises(UserError) as caught:
            make()
        assert message in str(caught.value)
        assert '\n' not in str(caught.value)


def test_unknown_names_get_the_nearest_valid_one():
    for make in (
        lambda: ModelConfig().replace(num_head=4),
        lambda: ModelConfig.from_dict({'num_head': 4}),
        lambda: preset('transformer_base', num_head=4),
    ):
        with pytest.raises(UserError, match="model.num_head is unknown; did you mean 'num_heads'?"):
            make()
    with pytest.raises(UserError, match="preset = 'transformer_bse' is unknown; did you mean 'transformer_base'?"):
        preset('transformer_bse')
    with pytest.raises(UserError, match="model.rope_scaling.factr is unknown; did you mean 'factor'?"):
        ModelConfig.from_dict(dict(position='rope', rope_scaling={'kind': 'linear', 'factr': 2.0}))
    with pytest.raises(UserError, match="did you mean 'yarn'?"):
        RopeScaling('yarm', 2.0, 100)
    with pytest.raises(UserError, match='needs original_positions'):
        RopeScaling('yarn', 2.0)


@pytest.mark.parametrize('config', [
    ModelConfig(),
    ModelConfig(kind='decoder', position='rope', rope_scaling=RopeScaling('yarn', 4.0, 2048), num_kv_heads=2),
    ModelConfig(layer_pattern=('local', 'global'), window=16, decode=DecodeConfig()),
    *(preset(name) for name in PRESETS),
])  # fmt: skip
def test_a_config_survives_json(config):
    back = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert back == config
    assert hash(back) == hash(config)
    assert type(back.rope_scaling) is type(config.rope_scaling) and type(back.decode) is type(config.decode)


def test_replace_gives_a_checked_copy_and_leaves_the_original():
    base = ModelConfig()
    copy = base.replace(num_heads=16)
    assert (base.num_heads, base.key_dim) == (8, 64) and (copy.num_heads, copy.key_dim, copy.value_dim) == (16, 32, 32)
    with pytest.raises(AttributeError):
        base.num_heads = 4


def test_defaults_are_the_base_model_of_the_paper():
    config = preset('transformer_base')
    assert (config.num_layers, config.d_model, config.d_ff, config.num_heads) == (6, 512, 2048, 8)
    assert (config.key_dim, config.value_dim, config.dropout, config.scale) == (64, 64, 0.1, 0.125)
    assert (config.norm_position, config.position, config.ffn) == ('post', 'sinusoidal', 'relu')
    big = preset('transformer_big')
    assert (big.num_layers, big.d_model, big.d_ff, big.num_heads, big.dropout) == (6, 1024, 4096, 16, 0.3)
