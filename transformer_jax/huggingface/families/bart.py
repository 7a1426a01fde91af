"""BART, mBART, Pegasus and Marian: one encoder-decoder, which differs in norm placement and positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface.derived import sinusoids
from transformer_jax.huggingface.family import ACTIVATIONS, Derived, Family, Field, Fields, Weight, norm_rows

_PROJECTIONS = (('q_proj', 'query'), ('k_proj', 'key'), ('v_proj', 'value'))


def _sublayer_norm(theirs: str, ours: str) -> tuple[Weight, ...]:
    """The same name, whether the norm stands before the sublayer or after the sum."""
    return norm_rows(theirs, ours + '/in_norm') + norm_rows(theirs, ours + '/out_norm')


def _attention(theirs: str, ours: str) -> tuple[Weight, ...]:
    rows = []
    for name, own in _PROJECTIONS:
        rows.append(Weight(f'{theirs}.{name}.weight', f'{ours}/{own}/kernel', '(N H) D -> D N H'))
        rows.append(Weight(f'{theirs}.{name}.bias', f'{ours}/{own}/bias', '(N H) -> N H'))
    rows.append(Weight(f'{theirs}.out_proj.weight', f'{ours}/out/kernel', 'D (N H) -> N H D'))
    rows.append(Weight(f'{theirs}.out_proj.bias', f'{ours}/out/bias', 'D'))
    return tuple(rows)


def _stack(stack: str) -> tuple[Weight, ...]:
    theirs, ours = f'model.{stack}.layers.{{i}}.', f'{stack}/layers_{{i}}/'
    cross = _attention(theirs + 'encoder_attn', ours + 'cross_attention')
    cross += _sublayer_norm(theirs + 'encoder_attn_layer_norm', ours + 'cross_attention_residual')
    return (
        Weight(f'model.{stack}.embed_positions.weight', f'{stack}_embedder/position/embedding', 'P D'),
        *norm_rows(f'model.{stack}.layernorm_embedding', f'{stack}_embedder/norm'),
        *_attention(theirs + 'self_attn', ours + 'attention'),
        *_sublayer_norm(theirs + 'self_attn_layer_norm', ours + 'attention_residual'),
        *(cross if stack == 'decoder' else ()),
        Weight(theirs + 'fc1.weight', ours + 'ffn/up/kernel', 'F D -> D F'),
        Weight(theirs + 'fc1.bias', ours + 'ffn/up/bias', 'F'),
        Weight(theirs + 'fc2.weight', ours + 'ffn/down/kernel', 'D F -> F D'),
        Weight(theirs + 'fc2.bias', ours + 'ffn/down/bias', 'D'),
        *_sublayer_norm(theirs + 'final_layer_norm', ours + 'ffn_residual'),
        *norm_rows(f'model.{stack}.layer_norm', f'{stack}/final_norm'),
    )


WEIGHTS = (
    Weight('model.shared.weight', 'embedding/embedding', 'V D'),
    Weight('model.encoder.embed_tokens.weight', 'source_embedding/embedding', 'V D'),
    Weight('model.decoder.embed_tokens.weight', 'target_embedding/embedding', 'V D'),
    *_stack('encoder'),
    *_stack('decoder'),
    Weight('final_logits_bias', 'head/bias', '1 V -> V'),
)

DERIVED = (
    Derived(
        r'model\.(en|de)coder\.embed_tokens\.weight', 'tied to the shared embedding', tied_to='model.shared.weight'
    ),
    Derived(r'lm_head\.weight', 'tied to the shared embedding', tied_to='model.shared.weight'),
    Derived(r'model\.(en|de)coder\.version', 'the version of the exporter'),
)

CHOICES = dict(
    kind='encoder_decoder', norm='layer', norm_epsilon=1e-5, qkv_bias=True, out_bias=True, ffn_bias=True,
    tie_embeddings='all',
)  # fmt: skip

FIELDS = (
    Field('vocab_size', 'vocab_size'),
    Field('d_model', 'd_model'),
    Field('encoder_ffn_dim', 'd_ff'),
    Field('decoder_ffn_dim', 'd_ff'),
    Field('encoder_layers', 'num_layers'),
    Field('decoder_layers', 'num_decoder_layers'),
    Field('encoder_attention_heads', 'num_heads'),
    Field('decoder_attention_heads', 'num_heads'),
    Field('max_position_embeddings', 'max_positions', 1024),
    Field('activation_function', 'ffn', 'gelu', ACTIVATIONS),
    Field('dropout', 'dropout', 0.1),
    Field('attention_dropout', 'attention_dropout', 0.0),
    Field('activation_dropout', 'ffn_dropout', 0.0),
    Field('scale_embedding', 'embedding_scale', False, {True: 'sqrt_d_model', False: 'none'}),
)

# Fields of old files, which transformers no longer reads.
IGNORED = (
    'num_hidden_layers', 'hidden_size', 'num_attention_heads', 'add_bias_logits', 'add_final_layer_norm', 'save_step',
    'do_blenderbot_90_layernorm', 'extra_pos_embeddings', 'normalize_before', 'normalize_embedding',
    'static_position_embeddings',
)  # fmt: skip

HEADS = {'head': 'lm', 'logits_bias': True}
BARE = {'head': 'none', 'logits_bias': False}


def _write(config: ModelConfig) -> Fields:
    # Transformers 5 takes the depth of caches from it.
    depths = {'num_hidden_layers': config.depth('encoder'), 'decoder_layers': config.depth('decoder')}
    return depths | {'is_encoder_decoder': True}


def _family(name: str, choices: Fields, **more: Any) -> Family:
    return Family(
        model_type=name.lower(),
        architectures={f'{name}ForConditionalGeneration': HEADS, f'{name}Model': BARE},
        base_prefix='model.',
        choices=CHOICES | choices,
        fields=FIELDS,
        weights=WEIGHTS,
        fixed={'tie_word_embeddings': True},
        ignored=IGNORED,
        optional=('final_logits_bias',),
        write=_write,
        **{'derived': DERIVED} | more,
    )


_SINUSOIDS = (Derived(r'model\.(en|de)coder\.embed_positions\.weight', 'sinusoids', sinusoids),)

def _sinusoids(config: ModelConfig) -> dict[str, np.ndarray]:
    table = sinusoids(config, (config.max_positions, config.d_model))
    return {f'model.{stack}.embed_positions.weight': table for stack in ('encoder', 'decoder')}


BART = _family('Bart', dict(norm_position='post', embedding_norm=True, position='learned', position_offset=2))
MBART = _family('MBart', dict(norm_position='pre', embedding_norm=True, position='learned', position_offset=2))
PEGASUS = _family(
    'Pegasus',
    dict(norm_position='pre', position='sinusoidal_halves'),
    derived=DERIVED + _SINUSOIDS,
    write_tensors=_sinusoids,
)


def _read_marian(fields: Fields, names: frozenset[str]) -> Fields:
    target = fields.get('decoder_vocab_size') or fields['vocab_size']
    if target != fields['vocab_size']:
        raise UserError(f'decoder_vocab_size = {target} is not vocab_size = {fields["vocab_size"]}; one vocabulary '
                        'serves both sides here')  # fmt: skip
    return {}


def _write_marian(config: ModelConfig) -> Fields:
    return _write(config) | {'decoder_vocab_size': config.vocab_size}


MARIAN = Family(
    model_type='marian',
    architectures={'MarianMTModel': HEADS, 'MarianModel': BARE},
    base_prefix='model.',
    choices={name: value for name, value in CHOICES.items() if name != 'tie_embeddings'}
    | dict(norm_position='post', position='sinusoidal_halves'),
    fields=FIELDS
    + (Field('share_encoder_decoder_embeddings', 'tie_embeddings', True, {True: 'all', False: 'output'}),),
    weights=WEIGHTS,
    derived=DERIVED
    + (Derived(r'lm_head\.weight', "tied to the decoder's embedding", tied_to='model.decoder.embed_tokens.weight'),)
    + _SINUSOIDS,
    fixed={'tie_word_embeddings': True},
    ignored=IGNORED,
    known=('decoder_vocab_size',),
    read=_read_marian,
    write=_write_marian,
    optional=('final_logits_bias',),
)
