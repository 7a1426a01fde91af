"""LLaMA, and Mistral, Qwen2 and Qwen3, which differ from it in biases, norms of queries and keys, and windows."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface import rope
from transformer_jax.huggingface.derived import inverse_frequencies
from transformer_jax.huggingface.family import GATED, Derived, Family, Field, Fields, Weight, with_defaults
from transformer_jax.huggingface.layer_types import read_pattern, write_types

LAYER, OURS = 'model.layers.{i}.', 'decoder/layers_{i}/'

PROJECTIONS = (
    Weight('model.embed_tokens.weight', 'embedding/embedding', 'V D'),
    Weight(LAYER + 'self_attn.q_proj.weight', OURS + 'attention/query/kernel', '(N H) D -> D N H'),
    Weight(LAYER + 'self_attn.q_proj.bias', OURS + 'attention/query/bias', '(N H) -> N H'),
    Weight(LAYER + 'self_attn.k_proj.weight', OURS + 'attention/key/kernel', '(K H) D -> D K H'),
    Weight(LAYER + 'self_attn.k_proj.bias', OURS + 'attention/key/bias', '(K H) -> K H'),
    Weight(LAYER + 'self_attn.v_proj.weight', OURS + 'attention/value/kernel', '(K H) D -> D K H'),
    Weight(LAYER + 'self_attn.v_proj.bias', OURS + 'attention/value/bias', '(K H) -> K H'),
    Weight(LAYER + 'self_attn.o_proj.weight', OURS + 'attention/out/kernel', 'D (N H) -> N H D'),
    Weight(LAYER + 'self_attn.o_proj.bias', OURS + 'attention/out/bias', 'D'),
    Weight(LAYER + 'self_attn.q_norm.weight', OURS + 'attention/query_norm/scale', 'H'),
    Weight(LAYER + 'self_attn.k_norm.weight', OURS + 'attention/key_norm/scale', 'H'),
    Weight(LAYER + 'mlp.gate_proj.weight', OURS + 'ffn/gate/kernel', 'F D -> D F'),
    Weight(LAYER + 'mlp.gate_proj.bias', OURS + 'ffn/gate/bias', 'F'),
    Weight(LAYER + 'mlp.up_proj.weight', OURS + 'ffn/up/kernel', 'F D -> D F'),
    Weight(LAYER + 'mlp.up_proj.bias', OURS + 'ffn/up/bias', 'F'),
    Weight(LAYER + 'mlp.down_proj.weight', OURS + 'ffn/down/kernel', 'D F -> F D'),
    Weight(LAYER + 'mlp.down_proj.bias', OURS + 'ffn/down/bias', 'D'),
    Weight('model.norm.weight', 'decoder/final_norm/scale', 'D'),
    Weight('lm_head.weight', 'head/output/kernel', 'V D -> D V'),
)

WEIGHTS = PROJECTIONS + (
    Weight(LAYER + 'input_layernorm.weight', OURS + 'attention_residual/in_norm/scale', 'D'),
    Weight(LAYER + 'post_attention_layernorm.weight', OURS + 'ffn_residual/in_norm/scale', 'D'),
)

DERIVED = (
    Derived(r'lm_head\.weight', 'tied to the embedding', tied_to='model.embed_tokens.weight'),
    Derived(r'model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq', 'frequencies', inverse_frequencies),
)

CHOICES = dict(
    kind='decoder', position='rope', norm='rms', norm_position='pre', embedding_scale='none', dropout=0.0,
)  # fmt: skip

SIZES = (
    Field('vocab_size', 'vocab_size'),
    Field('hidden_size', 'd_model'),
    Field('intermediate_size', 'd_ff'),
    Field('num_hidden_layers', 'num_layers'),
    Field('num_attention_heads', 'num_heads'),
    Field('rms_norm_eps', 'norm_epsilon', 1e-6),
    Field('attention_dropout', 'attention_dropout', 0.0),
)

FIELDS = SIZES + (
    Field('num_key_value_heads', 'num_kv_heads', None),
    Field('head_dim', 'd_k', None),
    Field('hidden_act', 'ffn', 'silu', GATED),
    Field('tie_word_embeddings', 'tie_embeddings', False, {True: 'output', False: 'none'}),
)
BIASES = (
    Field('attention_bias', 'qkv_bias', False),
    Field('attention_bias', 'out_bias', False),
)


def read(fields: Fields, names: frozenset[str]) -> Fields:
    """Rotary positions; a number of key heads or a head width which is the default here is left to it."""
    choices, N = rope.read_rope(fields), fields['num_attention_heads']
    if fields.get('num_key_value_heads') == N:
        choices['num_kv_heads'] = None
    if fields.get('head_dim') is not None and fields['head_dim'] * N == fields['hidden_size']:
        choices['d_k'] = None
    return choices


def write(config: ModelConfig) -> Fields:
    """The reverse; numbers and widths are stated in any case, for transformers' own defaults differ by family."""
    return rope.write_rope(config) | {'head_dim': config.key_dim, 'num_key_value_heads': config.kv_heads}


def _architectures(name: str) -> dict[str, Fields]:
    return {f'{name}ForCausalLM': {'head': 'lm'}, f'{name}Model': {'head': 'none'}}


def _read_mistral(fields: Fields, names: frozenset[str]) -> Fields:
    window = fields.get('sliding_window', 4096)
    local = {} if window is None else {'window': window, 'layer_pattern': ('local',)}
    return read(fields, names) | local


def _write_mistral(config: ModelConfig) -> Fields:
    return write(config) | {'sliding_window': config.window}


def _read_qwen(fields: Fields, names: frozenset[str]) -> Fields:
    choices, L = read(fields, names), fields['num_hidden_layers']
    window = fields.get('sliding_window', 4096) if fields.get('use_sliding_window') else None
    first = fields.get('max_window_layers', 28)
    # Layers below max_window_layers see all tokens, those above a window.
    types = ['sliding_attention' if window and i >= first else 'full_attention' for i in range(L)]
    types = fields.get('layer_types') or types
    if 'sliding_attention' in types and window is None:
        raise UserError('layer_types holds sliding_attention, but there is no sliding_window in use')
    if 'sliding_attention' in types:
        choices |= {'window': window, 'layer_pattern': read_pattern(types)}
    return choices


def _write_qwen(config: ModelConfig) -> Fields:
    types, windowed = write_types(config), config.window is not None
    return write(config) | {'use_sliding_window': windowed, 'sliding_window': config.window, 'layer_types': types,
                            'max_window_layers': types.count('full_attention')}  # fmt: skip


LLAMA = Family(
    model_type='llama',
    architectures=_architectures('Llama'),
    base_prefix='model.',
    choices=CHOICES,
    fields=FIELDS + BIASES + (Field('mlp_bias', 'ffn_bias', False),),
    weights=WEIGHTS,
    derived=DERIVED,
    known=rope.KNOWN,
    read=read,
    write=write,
)

MISTRAL = Family(
    model_type='mistral',
    architectures=_architectures('Mistral'),
    base_prefix='model.',
    choices=CHOICES | dict(qkv_bias=False, out_bias=False, ffn_bias=False),
    fields=with_defaults(FIELDS, num_key_value_heads=8),
    weights=WEIGHTS,
    derived=DERIVED,
    known=(*rope.KNOWN, 'sliding_window'),
    read=_read_mistral,
    write=_write_mistral,
)

QWEN2 = Family(
    model_type='qwen2',
    architectures=_architectures('Qwen2'),
    base_prefix='model.',
    choices=CHOICES | dict(qkv_bias=True, out_bias=False, ffn_bias=False),
    fields=with_defaults(FIELDS, num_key_value_heads=32),
    weights=WEIGHTS,
    derived=DERIVED,
    known=(*rope.KNOWN, 'sliding_window', 'use_sliding_window', 'max_window_layers', 'layer_types'),
    read=_read_qwen,
    write=_write_qwen,
)

QWEN3 = Family(
    model_type='qwen3',
    architectures=_architectures('Qwen3'),
    base_prefix='model.',
    choices=CHOICES | dict(ffn_bias=False, qk_norm='head'),
    fields=with_defaults(FIELDS + BIASES, num_key_value_heads=32, head_dim=128),
    weights=WEIGHTS,
    derived=DERIVED,
    known=QWEN2.known,
    read=_read_qwen,
    write=_write_qwen,
)
