"""generation_config.json and DecodeConfig, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_jax.config import ModelConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface.family import GENERATION, Fields
from transformer_jax.huggingface.tensors import read_json

FILE = 'generation_config.json'

# Theirs -> ours, where value and meaning are the same.
_SAME = {
    'max_new_tokens': 'max_new_tokens', 'min_new_tokens': 'min_new_tokens', 'num_beams': 'beam_size',
    'num_return_sequences': 'num_return', 'do_sample': 'sample', 'repetition_penalty': 'repetition_penalty',
    'no_repeat_ngram_size': 'no_repeat_ngram_size', 'forced_bos_token_id': 'forced_first_token',
    'forced_eos_token_id': 'forced_last_token', 'num_beam_groups': 'beam_groups',
    'diversity_penalty': 'diversity_penalty',
}  # fmt: skip
_SAMPLING = {'temperature': 'temperature', 'top_k': 'top_k', 'top_p': 'top_p', 'min_p': 'min_p'}
_STOPPING = {True: 'first', False: 'heuristic', 'never': 'bound'}
_IDS = ('eos_token_id', 'pad_token_id', 'bos_token_id', 'decoder_start_token_id')
_BY_HAND = ('max_length', 'min_length', 'length_penalty', 'early_stopping', 'bad_words_ids', 'suppress_tokens', *_IDS)

# Fields which change nothing of what is generated, and fields which have no effect at these values.
_IGNORED = frozenset(
    """transformers_version _from_model_config use_cache output_attentions output_hidden_states output_scores
    output_logits return_dict_in_generate cache_implementation is_assistant num_assistant_tokens prefill_chunk_size
    num_assistant_tokens_schedule assistant_confidence_threshold remove_invalid_values renormalize_logits
    trust_remote_code disable_compile""".split()
)
_NEUTRAL: Fields = {
    'typical_p': 1.0, 'epsilon_cutoff': 0.0, 'eta_cutoff': 0.0, 'encoder_repetition_penalty': 1.0,
    'guidance_scale': 1.0, 'encoder_no_repeat_ngram_size': 0, 'top_h': None,
}  # fmt: skip


def read_generation(folder: Path, model_fields: Fields, config: ModelConfig) -> DecodeConfig:
    """Returns the settings of generation_config.json, or else those which old versions keep in config.json.

    Raises:
      UserError: naming every field with a value which this search has no equal of, or a setting out of range.
    """
    path = folder / FILE
    if path.exists():
        fields = read_json(path)
    else:
        path = folder / 'config.json'
        fields = {name: model_fields[name] for name in model_fields if name in GENERATION or name in _IDS}
    try:
        return DecodeConfig(**_choices(fields, model_fields, config))
    except UserError as error:
        raise UserError(f'{path}: {error}; with generation=False it is not read') from None


def _choices(fields: Fields, model_fields: Fields, config: ModelConfig) -> Fields:
    stated = {name: value for name, value in fields.items() if value is not None}
    choices = {ours: stated[theirs] for theirs, ours in _SAME.items() if theirs in stated}
    sampling = {ours: stated[theirs] for theirs, ours in _SAMPLING.items() if theirs in stated}
    if choices.get('sample'):
        # Sampling of transformers keeps the 50 likeliest unless told otherwise.
        choices |= {'top_k': 50} | sampling
    choices |= _lengths(stated, config)
    choices |= {'length_penalty': 'length', 'length_penalty_alpha': float(stated.get('length_penalty', 1.0))}
    choices['early_stopping'] = _STOPPING[stated.get('early_stopping', False)]
    forbidden = [tuple(ids) if len(ids) > 1 else ids[0] for ids in stated.get('bad_words_ids', ())]
    choices['forbidden_tokens'] = (*forbidden, *stated.get('suppress_tokens', ()))
    ids = {name: stated.get(name, model_fields.get(name)) for name in _IDS}
    eos = ids['eos_token_id']
    choices['eos_ids'] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    pad = ids['pad_token_id']
    choices['pad_id'] = pad if pad is not None and pad >= 0 else (*choices['eos_ids'], 0)[0]
    if config.kind == 'encoder_decoder':
        start = ids['decoder_start_token_id']
        choices['decoder_start_id'] = start if start is not None else ids['bos_token_id'] or 0
    read = {*_SAME, *_SAMPLING, *_BY_HAND}
    other = sorted(
        f'{name} = {value!r}' for name, value in stated.items()
        if name not in read and name not in _IGNORED and value not in (_NEUTRAL.get(name), False, [], {})
    )  # fmt: skip
    if other:
        raise UserError(f'{", ".join(other)}: no such setting here')
    return choices


def _lengths(stated: Fields, config: ModelConfig) -> Fields:
    """Limits which count the whole sequence: with an encoder, one start token more than what is generated."""
    if config.kind == 'encoder_decoder':
        lengths = {}
        if 'max_new_tokens' not in stated and stated.get('max_length', 20) > 1:
            lengths['max_new_tokens'] = stated.get('max_length', 20) - 1
        if 'min_new_tokens' not in stated and stated.get('min_length', 0) > 1:
            lengths['min_new_tokens'] = stated['min_length'] - 1
        return lengths
    limits = [limit for limit in (config.max_positions, config.trained_positions) if limit is not None]
    if stated.get('max_length', 20) not in (20, *limits) and 'max_new_tokens' not in stated:
        raise UserError(f'max_length = {stated["max_length"]} counts the prompt too, which has no equal here '
                        '(max_new_tokens has)')  # fmt: skip
    if stated.get('min_length'):
        raise UserError(f'min_length = {stated["min_length"]} counts the prompt too, which has no equal here')
    return {}


def token_fields(config: ModelConfig) -> Fields:
    """Returns the token ids which config.json holds."""
    decode = config.decode
    if decode is None:
        return {}
    ids: Fields = {'pad_token_id': decode.pad_id}
    if decode.eos_ids:
        ids['eos_token_id'] = decode.eos_ids[0] if len(decode.eos_ids) == 1 else list(decode.eos_ids)
    if config.kind == 'encoder_decoder':
        ids['decoder_start_token_id'] = decode.decoder_start_id
    return ids


def write_generation(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of generation_config.json which say `config.decode`.

    Raises:
      UserError: for a setting which transformers has not.
    """
    decode = config.decode
    lacking = [name for name, neutral in (('max_new_tokens_over_source', None), ('prefix_tokens', ()))
               if getattr(decode, name) != neutral]  # fmt: skip
    if decode.length_penalty == 'gnmt' and decode.beam_size > 1 and decode.length_penalty_alpha:
        lacking.append('length_penalty')
    if isinstance(decode.temperature, tuple):
        lacking.append('temperature')
    if lacking:
        said = ', '.join(f'decode.{name} = {getattr(decode, name)!r}' for name in lacking)
        raise UserError(f'generation_config.json cannot say {said}')
    fields = {theirs: getattr(decode, ours) for theirs, ours in _SAME.items()}
    if decode.sample:
        fields |= {theirs: getattr(decode, ours) for theirs, ours in _SAMPLING.items()}
    if config.kind == 'encoder_decoder' and decode.max_new_tokens is None:
        fields['max_length'] = 1
    fields['early_stopping'] = {ours: theirs for theirs, ours in _STOPPING.items()}[decode.early_stopping]
    fields['length_penalty'] = decode.length_penalty_alpha if decode.length_penalty == 'length' else 0.0
    forbidden = [list(ids) if isinstance(ids, tuple) else [ids] for ids in decode.forbidden_tokens]
    fields['bad_words_ids'] = forbidden or None
    return {name: value for name, value in (fields | token_fields(config)).items() if value is not None}
