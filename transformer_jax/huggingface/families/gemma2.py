"""Gemma 2: norms on both sides of a sublayer, capped scores and logits, every other layer with a window."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.huggingface import rope
from transformer_jax.huggingface.families import llama
from transformer_jax.huggingface.family import GATED, Family, Field, Fields, Weight
from transformer_jax.huggingface.layer_types import read_pattern, write_types

_LAYER, _OURS = llama.LAYER, llama.OURS


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    alternating = [f'{"full" if i % 2 else "sliding"}_attention' for i in range(fields['num_hidden_layers'])]
    pattern = read_pattern(fields.get('layer_types') or alternating)
    window = {'window': fields.get('sliding_window', 4096)} if 'local' in pattern else {}
    scale = fields.get('query_pre_attn_scalar', 256) ** -0.5
    return llama.read(fields, names) | window | {'layer_pattern': pattern, 'attention_scale': scale}


def _write(config: ModelConfig) -> Fields:
    scalar = config.scale**-2
    whole = round(scalar) if round(scalar) ** -0.5 == config.scale else scalar
    own = {'query_pre_attn_scalar': whole, 'sliding_window': config.window, 'layer_types': write_types(config)}
    return llama.write(config) | own


GEMMA2 = Family(
    model_type='gemma2',
    architectures={'Gemma2ForCausalLM': {'head': 'lm'}, 'Gemma2Model': {'head': 'none'}},
    base_prefix='model.',
    choices=llama.CHOICES
    | dict(norm='rms_plus_one', norm_position='sandwich', embedding_scale='sqrt_d_model', ffn_bias=False),
    fields=llama.SIZES
    + llama.BIASES
    + (
        Field('num_key_value_heads', 'num_kv_heads', 4),
        Field('head_dim', 'd_k', 256),
        Field('hidden_activation', 'ffn', 'gelu_pytorch_tanh', {'gelu_pytorch_tanh': 'gated_gelu_tanh'} | GATED),
        Field('tie_word_embeddings', 'tie_embeddings', True, {True: 'output', False: 'none'}),
        Field('attn_logit_softcapping', 'attention_softcap', None),
        Field('final_logit_softcapping', 'logits_softcap', None),
    ),
    weights=llama.PROJECTIONS
    + (
        Weight(_LAYER + 'input_layernorm.weight', _OURS + 'attention_residual/in_norm/scale', 'D'),
        Weight(_LAYER + 'post_attention_layernorm.weight', _OURS + 'attention_residual/branch_norm/scale', 'D'),
        Weight(_LAYER + 'pre_feedforward_layernorm.weight', _OURS + 'ffn_residual/in_norm/scale', 'D'),
        Weight(_LAYER + 'post_feedforward_layernorm.weight', _OURS + 'ffn_residual/branch_norm/scale', 'D'),
    ),
    derived=llama.DERIVED,
    fixed={'use_bidirectional_attention': False},
    # The field `hidden_act` stands beside `hidden_activation` in some files, and is not read by transformers.
    ignored=('hidden_act',),
    known=(*rope.KNOWN, 'sliding_window', 'layer_types', 'query_pre_attn_scalar', 'cache_implementation'),
    read=_read,
    write=_write,
)
