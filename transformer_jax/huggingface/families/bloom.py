"""BLOOM: ALiBi, a norm after the embedding, and queries, keys and values head by head in one matrix."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface.family import (
    QUERY_KEY_VALUE,
    Derived,
    Family,
    Field,
    Fields,
    Weight,
    fused_rows,
    norm_rows,
)

_LAYER, _OURS = 'transformer.h.{i}.', 'decoder/layers_{i}/'
_FUSED = _LAYER + 'self_attention.query_key_value'


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    sizes = {'d_model': ('n_embed', 'hidden_size'), 'num_layers': ('n_layer', 'num_hidden_layers'),
             'num_heads': ('n_head', 'num_attention_heads')}  # fmt: skip
    choices = {}
    for ours, spellings in sizes.items():
        stated = [fields[name] for name in spellings if fields.get(name) is not None]
        if not stated:
            raise UserError(f'config.json lacks {spellings[-1]}, which bloom models state')
        choices[ours] = stated[0]
    return choices | {'d_ff': 4 * choices['d_model']}


def _write(config: ModelConfig) -> Fields:
    return {'hidden_size': config.d_model, 'n_layer': config.num_layers, 'n_head': config.num_heads}


BLOOM = Family(
    model_type='bloom',
    architectures={'BloomForCausalLM': {'head': 'lm'}, 'BloomModel': {'head': 'none'}},
    base_prefix='transformer.',
    choices=dict(
        kind='decoder', position='alibi', norm='layer', norm_position='pre', embedding_norm=True,
        embedding_scale='none', qkv_bias=True, out_bias=True, ffn_bias=True, ffn='gelu_tanh',
    ),
    fields=(
        Field('vocab_size', 'vocab_size'),
        Field('layer_norm_epsilon', 'norm_epsilon', 1e-5),
        Field('hidden_dropout', 'dropout', 0.0),
        Field('attention_dropout', 'attention_dropout', 0.0),
        Field('tie_word_embeddings', 'tie_embeddings', True, {True: 'output', False: 'none'}),
    ),
    weights=(
        Weight('transformer.word_embeddings.weight', 'embedding/embedding', 'V D'),
        *norm_rows('transformer.word_embeddings_layernorm', 'embedder/norm'),
        *norm_rows(_LAYER + 'input_layernorm', _OURS + 'attention_residual/in_norm'),
        *fused_rows(_FUSED, _OURS + 'attention/', QUERY_KEY_VALUE, '(N q H) D -> q D N H', '(N q H) -> q N H'),
        Weight(_LAYER + 'self_attention.dense.weight', _OURS + 'attention/out/kernel', 'D (N H) -> N H D'),
        Weight(_LAYER + 'self_attention.dense.bias', _OURS + 'attention/out/bias', 'D'),
        *norm_rows(_LAYER + 'post_attention_layernorm', _OURS + 'ffn_residual/in_norm'),
        Weight(_LAYER + 'mlp.dense_h_to_4h.weight', _OURS + 'ffn/up/kernel', 'F D -> D F'),
        Weight(_LAYER + 'mlp.dense_h_to_4h.bias', _OURS + 'ffn/up/bias', 'F'),
        Weight(_LAYER + 'mlp.dense_4h_to_h.weight', _OURS + 'ffn/down/kernel', 'D F -> F D'),
        Weight(_LAYER + 'mlp.dense_4h_to_h.bias', _OURS + 'ffn/down/bias', 'D'),
        *norm_rows('transformer.ln_f', 'decoder/final_norm'),
        Weight('lm_head.weight', 'head/output/kernel', 'V D -> D V'),
    ),
    derived=(Derived(r'lm_head\.weight', 'tied to the embedding', tied_to='transformer.word_embeddings.weight'),),
    fixed={'apply_residual_connection_post_layernorm': False},
    ignored=('slow_but_exact', 'offset_alibi', 'seq_length', 'skip_bias_add', 'skip_bias_add_qkv', 'n_inner',
             'attention_softmax_in_fp32', 'bias_dropout_fusion', 'masked_softmax_fusion', 'unk_token_id'),
    known=('hidden_size', 'n_embed', 'n_layer', 'num_hidden_layers', 'n_head', 'num_attention_heads'),
    read=_read,
    write=_write,
)  # fmt: skip
