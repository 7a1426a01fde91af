"""Rotary positions in config.json: `rope_theta` and `rope_scaling`, or both in `rope_parameters` (transformers 5)."""

from __future__ import annotations

from typing import Any

from transformer_jax.config import ModelConfig, RopeScaling
from transformer_jax.errors import UserError, suggest
from transformer_jax.huggingface.family import Fields

KNOWN = ('rope_theta', 'rope_scaling', 'rope_parameters', 'partial_rotary_factor', 'max_position_embeddings')

# Fields of each type of scaling: theirs -> ours.
_LENGTH = {'factor': 'factor', 'original_max_position_embeddings': 'original_positions'}
_TYPES = {
    'default': {},
    'linear': {'factor': 'factor'},
    'dynamic': {'factor': 'factor'},
    'yarn': _LENGTH | {name: name for name in (
        'beta_fast', 'beta_slow', 'attention_factor', 'mscale', 'mscale_all_dim', 'truncate')},
    'llama3': _LENGTH | {'low_freq_factor': 'low_frequency_factor', 'high_freq_factor': 'high_frequency_factor'},
}  # fmt: skip


def read_rope(fields: Fields) -> Fields:
    """Returns rope_theta, rope_scaling, rope_fraction and trained_positions.

    Raises:
      UserError: for a type of scaling, or a field of it, which is not supported.
    """
    rope = dict(fields.get('rope_parameters') or fields.get('rope_scaling') or {})
    theta = rope.pop('rope_theta', None) or fields.get('rope_theta') or 10000.0
    fraction = rope.pop('partial_rotary_factor', None) or fields.get('partial_rotary_factor') or 1.0
    trained = fields.get('max_position_embeddings')
    return {
        'rope_theta': float(theta),
        'rope_fraction': float(fraction),
        'rope_scaling': read_scaling(rope, trained),
        'trained_positions': trained,
    }


def read_scaling(rope: dict[str, Any], trained: int | None) -> RopeScaling | None:
    """Returns the scaling which a dictionary of config.json states, None for 'default'."""
    kind = rope.pop('rope_type', None) or rope.pop('type', None) or 'default'
    rope.pop('type', None)
    if kind not in _TYPES:
        raise UserError(f"rope_type = '{kind}' is not supported{suggest(kind, _TYPES)}")
    stated = {name: value for name, value in rope.items() if value is not None}
    if kind == 'dynamic':
        # Transformers stretches from max_position_embeddings, and reads no other length.
        stated.pop('original_max_position_embeddings', None)
    unknown = sorted(set(stated) - set(_TYPES[kind]))
    if unknown:
        raise UserError(f"rope_type = '{kind}' with {unknown[0]} = {stated[unknown[0]]!r} is not supported")
    if kind == 'default':
        return None
    choices = {_TYPES[kind][name]: value for name, value in stated.items()}
    if kind in ('dynamic', 'yarn', 'llama3'):
        choices.setdefault('original_positions', trained)
    if kind == 'yarn' and 'factor' not in choices and trained is not None:
        choices['factor'] = trained / choices['original_positions']
    if 'factor' not in choices:
        raise UserError(f"rope_type = '{kind}' lacks factor")
    return RopeScaling(kind, **choices)


def write_rope(config: ModelConfig) -> Fields:
    """Returns the fields which say it, in the form which every version of transformers reads.

    Raises:
      UserError: for a scaling which transformers has not.
    """
    return {
        'rope_theta': config.rope_theta,
        'rope_scaling': write_scaling(config.rope_scaling),
        'max_position_embeddings': _trained(config),
    }


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Returns the dictionary which states a scaling."""
    if scaling is None:
        return None
    if scaling.kind not in _TYPES:
        raise UserError(f"transformers has no rope_scaling of kind '{scaling.kind}'")
    stated = {theirs: getattr(scaling, ours) for theirs, ours in _TYPES[scaling.kind].items()}
    return {'rope_type': scaling.kind} | {name: value for name, value in stated.items() if value is not None}


def _trained(config: ModelConfig) -> int:
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == 'dynamic':
        return scaling.original_positions
    return config.trained_positions or config.max_positions or 2048
