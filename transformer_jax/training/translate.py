"""From lines of text to translated lines: batches by length, answers in the order of the questions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding import generate

_logger = logging.getLogger(__name__)

WIDTH_MULTIPLE = 16


class Answer(NamedTuple):
    """One translation and its score as `generate` defines it."""

    text: str
    score: float


def translate(
    model: nn.Module,
    params: Any,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    config: DecodeConfig,
    *,
    longest: int,
    rows: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[Answer]]:
    """Returns for each line its `config.num_return` best translations, best first, in the order of `lines`.

    A line without text gives empty answers of score 0 and is not shown to the model. A line of more than `longest`
    tokens, EOS included, is cut, and the log says how many were. Lines are grouped by length into batches of `rows`
    rows whose widths are multiples of 16, so that few shapes are compiled; `progress(n)` hears of n lines done.
    """
    answers = [[Answer('', 0.0)] * config.num_return for _ in lines]
    asked = [index for index, line in enumerate(lines) if line.strip()]
    progress(len(lines) - len(asked))
    ids = {index: tokenizer.encode(lines[index]) for index in asked}
    cut = sum(len(tokens) >= longest for tokens in ids.values())
    if cut:
        _logger.warning('%d of %d lines are longer than %d tokens and were cut', cut, len(lines), longest)
    ids = {index: tokens[: longest - 1] + [tokenizer.eos_id] for index, tokens in ids.items()}
    order = sorted(asked, key=lambda index: len(ids[index]))
    rows = min(rows, 1 << max(len(order) - 1, 0).bit_length())
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        width = -(-max(len(ids[index]) for index in chosen) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        tokens = np.full((rows, width), tokenizer.pad_id, np.int32)
        mask = np.zeros((rows, width), np.int32)
        tokens[:, 0], mask[:, 0] = tokenizer.eos_id, 1  # rows which fill up the last batch are one token long
        for row, index in enumerate(chosen):
            tokens[row, : len(ids[index])] = ids[index]
            mask[row, : len(ids[index])] = 1
        found = generate(model, params, tokens, mask=mask, config=config, seed=seed)
        found_tokens, lengths, scores = (np.asarray(part) for part in (found.tokens, found.lengths, found.scores))
        for row, index in enumerate(chosen):
            texts = [
                _text(tokenizer, found_tokens[row, rank, :length], config) for rank, length in enumerate(lengths[row])
            ]
            answers[index] = [Answer(text, float(value)) for text, value in zip(texts, scores[row], strict=True)]
        progress(len(chosen))
    return answers


def _text(tokenizer: Tokenizer, ids: np.ndarray, config: DecodeConfig) -> str:
    """Returns plain text on one line; a line break which the model spelt in bytes becomes a space."""
    return ' '.join(tokenizer.decode(token for token in ids if token not in config.eos_ids).splitlines())
