"""From what a caller gives `generate` to what its program takes: checked, aligned and rounded up, all on the host."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.processors import Prompt
from transformer_jax.errors import UserError

DEFAULT_NEW_TOKENS = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SearchInputs:
    """Arguments of a search program which may change without a new compilation.

    Attributes:
      source: (B, S) padded on the right, or None for a decoder.
      source_mask: (B, S) booleans, or None.
      prompt: one row per sentence.
      seed: of sampling.
      temperature_B: of sampling, 0 for argmax.
      alpha: exponent of the length penalty.
    """

    source: np.ndarray | None
    source_mask: np.ndarray | None
    prompt: Prompt
    seed: np.ndarray
    temperature_B: np.ndarray
    alpha: np.ndarray


def bucket(length: int) -> int:
    """Rounds a length up so that few programs serve all: to a power of two up to 64, then to a multiple of 32."""
    return 1 << max(length - 1, 0).bit_length() if length <= 64 else -(-length // 32) * 32


def real_rows(tokens, mask, model: ModelConfig, what: str) -> list[np.ndarray]:
    """Returns each row's real tokens.

    Args:
      tokens: (B, S) ids.
      mask: (B, S), 1 for real tokens, or None where all are.
      model: for its vocabulary.
      what: name of the tokens in errors.

    Raises:
      UserError: on a wrong shape or type, or an id outside the vocabulary.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(f'{what} has shape {tokens.shape} and type {tokens.dtype}; it is (batch, length) of integers')
    mask = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    if mask.shape != tokens.shape:
        raise UserError(f'the mask of {what} has shape {mask.shape}; the tokens have {tokens.shape}')
    rows = [row[real] for row, real in zip(tokens, mask, strict=True)]
    for number, row in enumerate(rows):
        wrong = row[(row < 0) | (row >= model.vocab_size)]
        if wrong.size:
            raise UserError(f'{what} holds id {wrong[0]} in row {number}; the vocabulary has {model.vocab_size} ids')
    return rows


def check_ids(config: DecodeConfig, model: ModelConfig) -> None:
    """Holds the ids of `config` against the vocabulary of `model`.

    Raises:
      UserError: naming the field, the id and the size of the vocabulary.
    """
    for name, token in config.token_ids():
        if token >= model.vocab_size:
            raise UserError(f'{name} holds id {token}; the vocabulary has {model.vocab_size} ids')


def prepare(
    model: ModelConfig, tokens, mask, config: DecodeConfig, seed: int
) -> tuple[SearchInputs, DecodeConfig, int]:
    """Returns the program's arguments, the static part of `config`, and the bucket of new tokens.

    Prompts are moved to the right and sources to the left, so that either padding side gives the same answer.

    Raises:
      UserError: on ids, lengths or temperatures which do not fit the model or each other.
    """
    check_ids(config, model)
    encoder_decoder = model.kind == 'encoder_decoder'
    rows = real_rows(tokens, mask, model, 'the source' if encoder_decoder else 'the prompt')
    lengths_B = np.array([len(row) for row in rows], np.int32)
    if encoder_decoder:
        prompts = [np.array([config.decoder_start_id, *config.prefix_tokens])] * len(rows)
    else:
        prompts = [np.concatenate([row, np.array(config.prefix_tokens, row.dtype)]) for row in rows]
    for number, row in enumerate(prompts):
        if not len(row):
            raise UserError(f'row {number} of the prompt has no token; a decoder begins with at least one')
    limit_B = new_token_limits(model, config, lengths_B, np.array([len(row) for row in prompts]))
    source = source_mask = None
    if encoder_decoder:
        source, source_mask = _source(model, rows, config.pad_id)
    temperatures = config.temperatures
    if len(temperatures) not in (1, len(rows)):
        raise UserError(
            f'temperature has {len(temperatures)} numbers for {len(rows)} rows; give one, or one for each row'
        )
    inputs = SearchInputs(
        source,
        source_mask,
        _prompt(prompts, limit_B, config.pad_id, encoder_decoder),
        np.uint32(seed),
        np.broadcast_to(np.float32(temperatures), len(rows)),
        np.float32(config.length_penalty_alpha),
    )
    static = config.replace(
        max_new_tokens=None, max_new_tokens_over_source=None, temperature=1.0, length_penalty_alpha=0.0
    )
    return inputs, static, bucket(int(limit_B.max()))


def new_token_limits(
    model: ModelConfig, config: DecodeConfig, lengths_B: np.ndarray, prompts_B: np.ndarray
) -> np.ndarray:
    """Returns the most tokens each row may generate.

    Args:
      lengths_B: real tokens of the source, or of a decoder's prompt: what `max_new_tokens_over_source` adds to.
      prompts_B: tokens which the decoder reads before the first new one.

    Raises:
      UserError: when prompt and answer need more positions than the model has, or no token may be generated.
    """
    limits = []
    if config.max_new_tokens is not None:
        limits.append(np.full_like(lengths_B, config.max_new_tokens))
    if config.max_new_tokens_over_source is not None:
        limits.append(lengths_B + config.max_new_tokens_over_source)
    limit_B = np.min(limits, axis=0) if limits else np.full_like(lengths_B, DEFAULT_NEW_TOKENS)
    if model.max_positions is not None:
        # The last token is not read, so it needs no position.
        room_B = model.max_positions - prompts_B + 1
        needed_B = limit_B if limits else np.ones_like(limit_B)
        if (needed_B > room_B).any():
            row = int(np.argmax(needed_B - room_B))
            raise UserError(
                f'row {row}: a prompt of {prompts_B[row]} tokens and {needed_B[row]} new ones need '
                f'{prompts_B[row] + needed_B[row] - 1} positions; the model has {model.max_positions}'
            )
        limit_B = np.minimum(limit_B, room_B)
    if (limit_B < 1).any():
        raise UserError(
            f'row {int(np.argmin(limit_B))} may generate no token: an empty source, and max_new_tokens_over_source = 0'
        )
    return limit_B.astype(np.int32)


def _source(model: ModelConfig, rows: list[np.ndarray], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    longest = max(len(row) for row in rows)
    width = bucket(longest)
    if model.max_positions is not None:
        if longest > model.max_positions:
            raise UserError(
                f'a source of {longest} tokens is longer than the {model.max_positions} positions of the model'
            )
        width = min(width, model.max_positions)
    source = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros(source.shape, bool)
    for number, row in enumerate(rows):
        source[number, : len(row)] = row
        mask[number, : len(row)] = True
    return source, mask


def _prompt(rows: list[np.ndarray], limit_B: np.ndarray, pad_id: int, exact: bool) -> Prompt:
    longest = max(len(row) for row in rows)
    width = longest if exact else bucket(longest)
    tokens_BP = np.full((len(rows), width), pad_id, np.int32)
    for number, row in enumerate(rows):
        tokens_BP[number, width - len(row) :] = row
    return Prompt(tokens_BP, np.array([width - len(row) for row in rows], np.int32), limit_B)
