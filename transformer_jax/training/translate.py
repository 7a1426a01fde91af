"""From lines of text to translated, or continued, lines: batches by length, answers in the order of the questions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding import Draft, generate
from transformer_jax.errors import choose

_logger = logging.getLogger(__name__)

WIDTH_MULTIPLE = 16


class Answer(NamedTuple):
    """One answer to a line and its score as `generate` defines it."""

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
    too_long: str = 'truncate',
    draft: Draft | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[Answer]]:
    """Returns for each line its `config.num_return` best translations, best first, in the order of `lines`.

    A line without text gives empty answers of score 0 and is not shown to the model. A line of more than `longest`
    tokens, EOS included, is cut, or answered like one without text if `too_long` is 'skip', and the log says how many
    there were. Lines are grouped by length into batches of `rows` rows whose widths are multiples of 16, so that few
    shapes are compiled; `progress(n)` hears of n lines done. `draft` is that of `generate`.

    Raises:
      UserError: for an unknown `too_long`, or as `generate`.
    """
    ids = {index: tokenizer.encode(line) for index, line in enumerate(lines) if line.strip()}
    asked = _of_fitting_length(ids, len(lines), longest, too_long)
    sources = {index: ids[index][: longest - 1] + [tokenizer.eos_id] for index in asked}
    return _answer(
        model, params, tokenizer, sources, config, count=len(lines), rows=rows, draft=draft, seed=seed,
        progress=progress,
    )  # fmt: skip


def continue_lines(
    model: nn.Module,
    params: Any,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    config: DecodeConfig,
    *,
    longest: int,
    rows: int,
    too_long: str = 'truncate',
    draft: Draft | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[Answer]]:
    """Returns each line with what a causal language model writes after it, `config.num_return` times.

    The model reads the decoder start id and the line; after an empty line, what it begins by itself. Of a line of more
    than `longest` tokens, start id included, it reads the last, or it is answered by nothing if `too_long` is 'skip'.
    The rest is as in `translate`.

    Raises:
      UserError: as `translate`.
    """
    ids = {index: tokenizer.encode(line) for index, line in enumerate(lines)}
    asked = _of_fitting_length(ids, len(lines), longest, too_long)
    prompts = {index: [config.decoder_start_id, *ids[index][-(longest - 1) :]] for index in asked}
    return _answer(
        model, params, tokenizer, prompts, config, count=len(lines), rows=rows, draft=draft, seed=seed,
        progress=progress, before=ids,
    )  # fmt: skip


def _of_fitting_length(ids: Mapping[int, list[int]], count: int, longest: int, too_long: str) -> list[int]:
    """Returns which lines are answered, and says in the log what becomes of those which are too long."""
    choose('too_long', too_long, ('truncate', 'skip'))
    over = [index for index, tokens in ids.items() if len(tokens) >= longest]
    if over:
        fate = 'were cut' if too_long == 'truncate' else 'have empty answers'
        _logger.warning('%d of %d lines are longer than %d tokens and %s', len(over), count, longest, fate)
    skipped = set(over) if too_long == 'skip' else ()
    return [index for index in ids if index not in skipped]


def _answer(
    model: nn.Module,
    params: Any,
    tokenizer: Tokenizer,
    ids: Mapping[int, list[int]],
    config: DecodeConfig,
    *,
    count: int,
    rows: int,
    draft: Draft | None,
    seed: int,
    progress: Callable[[int], None],
    before: Mapping[int, list[int]] | None = None,
) -> list[list[Answer]]:
    """Returns the answers to sources or prompts by number of the line, empty ones for numbers which are not in `ids`.

    Args:
      count: number of lines.
      before: ids which are put in front of a line's answers.
    """
    answers = [[Answer('', 0.0)] * config.num_return for _ in range(count)]
    progress(count - len(ids))
    order = sorted(ids, key=lambda index: len(ids[index]))
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
        found = generate(model, params, tokens, mask=mask, config=config, seed=seed, draft=draft)
        found_tokens, lengths, scores = (np.asarray(part) for part in (found.tokens, found.lengths, found.scores))
        for row, index in enumerate(chosen):
            said = [] if before is None else before[index]
            texts = [
                _text(tokenizer, [*said, *found_tokens[row, rank, :length]], config)
                for rank, length in enumerate(lengths[row])
            ]
            answers[index] = [Answer(text, float(value)) for text, value in zip(texts, scores[row], strict=True)]
        progress(len(chosen))
    return answers


def _text(tokenizer: Tokenizer, ids: Sequence[int], config: DecodeConfig) -> str:
    """Returns plain text on one line; a line break which the model spelt in bytes becomes a space."""
    return ' '.join(tokenizer.decode(token for token in ids if token not in config.eos_ids).splitlines())
