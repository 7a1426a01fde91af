"""ModernBERT: a pre-norm encoder with rotary positions, windows in two layers of three, gates and no biases."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface.families import bert
from transformer_jax.huggingface.family import (
    ACTIVATIONS,
    GATED,
    QUERY_KEY_VALUE,
    Derived,
    Family,
    Field,
    Fields,
    Weight,
    fused_rows,
    norm_rows,
)
from transformer_jax.huggingface.layer_types import read_pattern, write_types
from transformer_jax.huggingface.rope import read_scaling

_LAYER, _OURS = 'model.layers.{i}.', 'encoder/layers_{i}/'
_FUSED = _LAYER + 'attn.Wqkv'
_POOLINGS = {'cls': 'first', 'mean': 'mean'}


def _theta(fields: Fields, kind: str, old: str, default: float) -> float:
    rope = dict((fields.get('rope_parameters') or {}).get(kind) or {})
    theta = rope.pop('rope_theta', None) or fields.get(old) or default
    if read_scaling(rope, None) is not None:
        raise UserError(f'rope_parameters of {kind} are scaled, which is not supported here')
    return float(theta)


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    L, every = fields['num_hidden_layers'], fields.get('global_attn_every_n_layers', 3)
    types = fields.get('layer_types') or [f'{"sliding" if i % every else "full"}_attention' for i in range(L)]
    pattern = read_pattern(types)
    # A token sees half of `local_attention` on either side, and itself.
    window = {'window': fields.get('local_attention', 128) // 2 + 1} if 'local' in pattern else {}
    choices = window | {
        'layer_pattern': pattern,
        'rope_theta': _theta(fields, 'full_attention', 'global_rope_theta', 160000.0),
        'rope_local_theta': _theta(fields, 'sliding_attention', 'local_rope_theta', 10000.0),
    }
    architecture = (fields.get('architectures') or ['ForMaskedLM'])[0]
    if architecture.endswith('Model'):
        return choices
    activation = fields.get('classifier_activation', 'gelu')
    if activation not in ACTIVATIONS:
        raise UserError(f"classifier_activation = '{activation}' is not supported")
    choices |= {'head_activation': ACTIVATIONS[activation], 'head_bias': fields.get('classifier_bias', False)}
    if architecture.endswith('ForMaskedLM'):
        return choices | {'logits_bias': fields.get('decoder_bias', True)}
    pooling = fields.get('classifier_pooling', 'cls')
    if pooling not in _POOLINGS:
        raise UserError(f"classifier_pooling = '{pooling}' is not supported")
    return choices | {'pooling': _POOLINGS[pooling], 'num_classes': bert.number_of_classes(fields)}


def _write(config: ModelConfig) -> Fields:
    fields: Fields = {
        'layer_types': write_types(config),
        'global_rope_theta': config.rope_theta,
        'local_rope_theta': config.rope_theta if config.rope_local_theta is None else config.rope_local_theta,
        'decoder_bias': config.logits_bias,
        'classifier_bias': config.head_bias,
    }
    if config.window is not None:
        fields['local_attention'] = 2 * (config.window - 1)
    if config.head_activation != 'none':
        fields['classifier_activation'] = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.head_activation]
    if config.pooling != 'none':
        fields['classifier_pooling'] = {ours: theirs for theirs, ours in _POOLINGS.items()}[config.pooling]
    return fields | bert.write_classes(config)


MODERNBERT = Family(
    model_type='modernbert',
    architectures={
        'ModernBertForMaskedLM': {'head': 'lm', 'head_norm': True},
        'ModernBertForSequenceClassification': {'head': 'classes', 'head_norm': True, 'logits_bias': False},
        'ModernBertModel': {'head': 'none', 'head_norm': False, 'logits_bias': False},
    },
    base_prefix='model.',
    choices=dict(
        kind='encoder', position='rope', norm='layer', norm_position='pre', first_norm=False, embedding_norm=True,
        embedding_scale='none', dropout=0.0, attention_dropout=0.0,
    ),
    fields=(
        Field('vocab_size', 'vocab_size'),
        Field('hidden_size', 'd_model'),
        Field('intermediate_size', 'd_ff'),
        Field('num_hidden_layers', 'num_layers'),
        Field('num_attention_heads', 'num_heads'),
        Field('hidden_activation', 'ffn', 'gelu', GATED),
        Field('max_position_embeddings', 'trained_positions', 8192),
        Field('norm_eps', 'norm_epsilon', 1e-5),
        Field('norm_bias', 'norm_bias', False),
        Field('attention_bias', 'qkv_bias', False),
        Field('attention_bias', 'out_bias', False),
        Field('mlp_bias', 'ffn_bias', False),
        Field('mlp_dropout', 'ffn_dropout', 0.0),
        Field('tie_word_embeddings', 'tie_embeddings', True, {True: 'output', False: 'none'}),
    ),
    weights=(
        Weight('model.embeddings.tok_embeddings.weight', 'embedding/embedding', 'V D'),
        *norm_rows('model.embeddings.norm', 'embedder/norm'),
        *norm_rows(_LAYER + 'attn_norm', _OURS + 'attention_residual/in_norm'),
        *fused_rows(_FUSED, _OURS + 'attention/', QUERY_KEY_VALUE, '(q N H) D -> q D N H', '(q N H) -> q N H'),
        Weight(_LAYER + 'attn.Wo.weight', _OURS + 'attention/out/kernel', 'D (N H) -> N H D'),
        Weight(_LAYER + 'attn.Wo.bias', _OURS + 'attention/out/bias', 'D'),
        *norm_rows(_LAYER + 'mlp_norm', _OURS + 'ffn_residual/in_norm'),
        *fused_rows(_LAYER + 'mlp.Wi', _OURS + 'ffn/', ('gate', 'up'), '(q F) D -> q D F', '(q F) -> q F'),
        Weight(_LAYER + 'mlp.Wo.weight', _OURS + 'ffn/down/kernel', 'D F -> F D'),
        Weight(_LAYER + 'mlp.Wo.bias', _OURS + 'ffn/down/bias', 'D'),
        *norm_rows('model.final_norm', 'encoder/final_norm'),
        Weight('head.dense.weight', 'head_layer/dense/kernel', 'E D -> D E'),
        Weight('head.dense.bias', 'head_layer/dense/bias', 'D'),
        *norm_rows('head.norm', 'head_layer/norm'),
        Weight('decoder.weight', 'head/output/kernel', 'V D -> D V', unless='head/output/bias'),
        Weight('decoder.bias', 'head/bias', 'V'),
        Weight('classifier.weight', 'head/output/kernel', 'C D -> D C', given='head/output/bias'),
        Weight('classifier.bias', 'head/output/bias', 'C'),
    ),
    derived=(
        Derived(r'decoder\.weight', 'tied to the embedding', tied_to='model.embeddings.tok_embeddings.weight'),
    ),
    fixed={'embedding_dropout': 0.0, 'attention_dropout': 0.0, 'classifier_dropout': 0.0},
    ignored=('deterministic_flash_attn', 'sparse_prediction', 'sparse_pred_ignore_index', 'reference_compile',
             'repad_logits_with_grad', 'layer_norm_eps', 'initializer_cutoff_factor'),
    known=('layer_types', 'global_attn_every_n_layers', 'local_attention', 'rope_parameters', 'global_rope_theta',
           'local_rope_theta', 'decoder_bias', 'classifier_bias', 'classifier_activation', 'classifier_pooling'),
    read=_read,
    write=_write,
)  # fmt: skip
