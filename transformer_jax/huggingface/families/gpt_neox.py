"""GPT-NeoX: parallel branches with a norm each, part of each head rotated, an output matrix of its own."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.huggingface import rope
from transformer_jax.huggingface.derived import causal, inverse_frequencies
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

_LAYER, _OURS = 'gpt_neox.layers.{i}.', 'decoder/layers_{i}/'
_FUSED = _LAYER + 'attention.query_key_value'


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    old = {'rope_theta': fields.get('rotary_emb_base', 10000), 'partial_rotary_factor': fields.get('rotary_pct', 0.25)}
    return rope.read_rope(old | {name: value for name, value in fields.items() if value is not None})


def _write(config: ModelConfig) -> Fields:
    fields = rope.write_rope(config)
    return fields | {'rotary_emb_base': fields.pop('rope_theta'), 'rotary_pct': config.rope_fraction}


GPT_NEOX = Family(
    model_type='gpt_neox',
    architectures={'GPTNeoXForCausalLM': {'head': 'lm'}, 'GPTNeoXModel': {'head': 'none'}},
    base_prefix='gpt_neox.',
    choices=dict(kind='decoder', position='rope', norm='layer', embedding_scale='none', ffn_bias=True),
    fields=(
        Field('vocab_size', 'vocab_size'),
        Field('hidden_size', 'd_model'),
        Field('intermediate_size', 'd_ff'),
        Field('num_hidden_layers', 'num_layers'),
        Field('num_attention_heads', 'num_heads'),
        Field('hidden_act', 'ffn', 'gelu', ACTIVATIONS),
        Field('layer_norm_eps', 'norm_epsilon', 1e-5),
        Field('hidden_dropout', 'dropout', 0.0),
        Field('attention_dropout', 'attention_dropout', 0.0),
        Field('attention_bias', 'qkv_bias', True),
        Field('attention_bias', 'out_bias', True),
        Field('use_parallel_residual', 'norm_position', True, {True: 'parallel_two_norms', False: 'pre'}),
        Field('tie_word_embeddings', 'tie_embeddings', False, {True: 'output', False: 'none'}),
    ),
    weights=(
        Weight('gpt_neox.embed_in.weight', 'embedding/embedding', 'V D'),
        *norm_rows(_LAYER + 'input_layernorm', _OURS + 'attention_residual/in_norm'),
        *fused_rows(_FUSED, _OURS + 'attention/', QUERY_KEY_VALUE, '(N q H) D -> q D N H', '(N q H) -> q N H'),
        Weight(_LAYER + 'attention.dense.weight', _OURS + 'attention/out/kernel', 'D (N H) -> N H D'),
        Weight(_LAYER + 'attention.dense.bias', _OURS + 'attention/out/bias', 'D'),
        *norm_rows(_LAYER + 'post_attention_layernorm', _OURS + 'ffn_residual/in_norm'),
        Weight(_LAYER + 'mlp.dense_h_to_4h.weight', _OURS + 'ffn/up/kernel', 'F D -> D F'),
        Weight(_LAYER + 'mlp.dense_h_to_4h.bias', _OURS + 'ffn/up/bias', 'F'),
        Weight(_LAYER + 'mlp.dense_4h_to_h.weight', _OURS + 'ffn/down/kernel', 'D F -> F D'),
        Weight(_LAYER + 'mlp.dense_4h_to_h.bias', _OURS + 'ffn/down/bias', 'D'),
        *norm_rows('gpt_neox.final_layer_norm', 'decoder/final_norm'),
        Weight('embed_out.weight', 'head/output/kernel', 'V D -> D V'),
    ),
    derived=(
        Derived(r'embed_out\.weight', 'tied to the embedding', tied_to='gpt_neox.embed_in.weight'),
        Derived(r'gpt_neox\.layers\.\d+\.attention\.bias', 'a causal mask', causal),
        Derived(r'gpt_neox\.layers\.\d+\.attention\.masked_bias', 'the score of a hidden key'),
        Derived(r'gpt_neox\.(layers\.\d+\.attention\.)?rotary_emb\.inv_freq', 'frequencies', inverse_frequencies),
    ),
    # Transformers 5 calls the output matrix lm_head, and reads the older name too.
    renames=((r'^lm_head\.', 'embed_out.'),),
    known=(*rope.KNOWN, 'rotary_emb_base', 'rotary_pct'),
    # Names of other families, which transformers does not read here.
    ignored=('attention_probs_dropout_prob', 'hidden_dropout_prob'),
    read=_read,
    write=_write,
)
