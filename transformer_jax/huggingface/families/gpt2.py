"""GPT-2: its linear layers store (in, out), and queries, keys and values lie one after another in one matrix."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.huggingface.derived import causal
from transformer_jax.huggingface.family import (
    ACTIVATIONS,
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
_FUSED = _LAYER + 'attn.c_attn'


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    return {'d_ff': fields.get('n_inner') or 4 * fields['n_embd']}


def _write(config: ModelConfig) -> Fields:
    return {'n_inner': config.d_ff}


GPT2 = Family(
    model_type='gpt2',
    architectures={'GPT2LMHeadModel': {'head': 'lm'}, 'GPT2Model': {'head': 'none'}},
    base_prefix='transformer.',
    choices=dict(
        kind='decoder', position='learned', norm='layer', norm_position='pre', embedding_scale='none', qkv_bias=True,
        out_bias=True, ffn_bias=True,
    ),
    fields=(
        Field('vocab_size', 'vocab_size'),
        Field('n_positions', 'max_positions', 1024),
        Field('n_embd', 'd_model'),
        Field('n_layer', 'num_layers'),
        Field('n_head', 'num_heads'),
        Field('activation_function', 'ffn', 'gelu_new', ACTIVATIONS),
        Field('resid_pdrop', 'dropout', 0.1),
        Field('embd_pdrop', 'dropout', 0.1),
        Field('attn_pdrop', 'attention_dropout', 0.1),
        Field('layer_norm_epsilon', 'norm_epsilon', 1e-5),
        Field('tie_word_embeddings', 'tie_embeddings', True, {True: 'output', False: 'none'}),
    ),
    weights=(
        Weight('transformer.wte.weight', 'embedding/embedding', 'V D'),
        Weight('transformer.wpe.weight', 'embedder/position/embedding', 'P D'),
        *norm_rows(_LAYER + 'ln_1', _OURS + 'attention_residual/in_norm'),
        *fused_rows(_FUSED, _OURS + 'attention/', QUERY_KEY_VALUE, 'D (q N H) -> q D N H', '(q N H) -> q N H'),
        Weight(_LAYER + 'attn.c_proj.weight', _OURS + 'attention/out/kernel', '(N H) D -> N H D'),
        Weight(_LAYER + 'attn.c_proj.bias', _OURS + 'attention/out/bias', 'D'),
        *norm_rows(_LAYER + 'ln_2', _OURS + 'ffn_residual/in_norm'),
        Weight(_LAYER + 'mlp.c_fc.weight', _OURS + 'ffn/up/kernel', 'D F'),
        Weight(_LAYER + 'mlp.c_fc.bias', _OURS + 'ffn/up/bias', 'F'),
        Weight(_LAYER + 'mlp.c_proj.weight', _OURS + 'ffn/down/kernel', 'F D'),
        Weight(_LAYER + 'mlp.c_proj.bias', _OURS + 'ffn/down/bias', 'D'),
        *norm_rows('transformer.ln_f', 'decoder/final_norm'),
        Weight('lm_head.weight', 'head/output/kernel', 'V D -> D V'),
    ),
    derived=(
        Derived(r'lm_head\.weight', 'tied to the embedding', tied_to='transformer.wte.weight'),
        Derived(r'transformer\.h\.\d+\.attn\.bias', 'a causal mask', causal),
        Derived(r'transformer\.h\.\d+\.attn\.masked_bias', 'the score of a hidden key'),
    ),
    fixed={'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False},
    ignored=('summary_type', 'summary_use_proj', 'summary_activation', 'summary_proj_to_labels',
             'summary_first_dropout', 'reorder_and_upcast_attn', 'n_ctx'),
    known=('n_inner',),
    read=_read,
    write=_write,
)  # fmt: skip
