"""What a pipeline and an evaluation ask of an objective, and what objectives share."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax import errors
from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import planner, ragged, sources, tokenizers

_CHUNK = 1 << 16
_LARGEST_EXPONENT = 700.0

Totals = Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a split as tokens.

    Attributes:
      streams: one `Ragged` for each token stream, end marks included.
      ids: (n,) number of each example in its source.
      total: examples before any was left out.
      truncated: examples which were cut to the length limit.
      too_long: examples left out because they exceed it.
      empty: examples left out because a side has no text.
    """

    streams: tuple[ragged.Ragged, ...]
    ids: np.ndarray
    total: int
    truncated: int = 0
    too_long: int = 0
    empty: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example in each stream, (n, streams)."""
        return np.stack([stream.lengths for stream in self.streams], axis=1)


class Objective(abc.ABC):
    """What the model has to do with an example.

    Args:
      tokenizer: the vocabulary of the examples, None where they are no texts.
      config: how long they may be, and what is chosen about the objective.
      model: the model which is trained, where there is one to be checked.

    Attributes:
      widths: width of the widest row in each token stream; no encoded example is longer.
      name: the objective's name in a config.
      kind, head: the model's choices of these names which it trains.
      references: whether an example has a target text against which what the model writes is scored.

    Raises:
      UserError: for a model of another kind or head, or a vocabulary which lacks a special id.
    """

    name: str
    kind: str
    head = 'lm'
    references = False

    def __init__(
        self, tokenizer: tokenizers.Tokenizer | None, config: data_config.DataConfig, model: ModelConfig | None = None
    ):
        for choice in ('kind', 'head') if model is not None else ():
            found, needed = getattr(model, choice), getattr(self, choice)
            if found != needed:
                raise errors.UserError(
                    f"data.objective = '{self.name}' needs model.{choice} = '{needed}', not '{found}'"
                )
        self._tokenizer, self._config = tokenizer, config
        self.widths = config.widths

    @abc.abstractmethod
    def encode(self, source: sources.Source, training: bool) -> Examples:
        """Turns the examples of `source` into tokens; all of them stay when not `training`."""

    @abc.abstractmethod
    def batch(self, examples: Examples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        """Builds the batch {'inputs', 'labels', 'weights'} of a plan's rows.

        An objective which draws at random does so from (seed, plan.epoch, example), so that hosts agree.
        """

    def metrics(self, totals: Totals, examples: Examples) -> dict[str, float]:
        """Returns what an evaluation reports of 'loss' (nats) and 'accuracy', each (sum, weight) over all examples.

        Unless an objective says otherwise: loss (nats a token), perplexity = exp(loss), accuracy, tokens and examples.
        """
        (loss, tokens), (right, _) = totals['loss'], totals['accuracy']
        mean = loss / tokens
        return {
            'loss': mean,
            'perplexity': math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf,
            'accuracy': right / tokens,
            'tokens': tokens,
            'examples': len(examples.ids),
        }


def decoder_start_id(tokenizer: tokenizers.Tokenizer, config: data_config.DataConfig) -> int:
    """Returns the first id which a decoder reads, in training and in search.

    Raises:
      UserError: for decoder_start 'bos' with a vocabulary which has no start id.
    """
    start = {'bos': tokenizer.bos_id, 'pad': tokenizer.pad_id}[config.decoder_start]
    if start < 0:
        raise errors.UserError("the vocabulary has no start id; choose data.decoder_start='pad'")
    return start


def chunks(source: sources.Source, fields: Sequence[str]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields (number of the first, examples) for stretches of a source.

    Raises:
      UserError: when there are no examples, or they lack a field.
    """
    if not len(source):
        raise errors.UserError(f"'{source.name}' has no examples")
    for start in range(0, len(source), _CHUNK):
        examples = [source[index] for index in range(start, min(start + _CHUNK, len(source)))]
        if missing := [field for field in fields if field not in examples[0]]:
            raise errors.UserError(
                f"'{source.name}' has {', '.join(examples[0])} but no {' or '.join(missing)}; "
                'give a data set which fits data.objective'
            )
        yield start, examples


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Texts cut into pieces: tokens without special ids, the number of each piece's text, UTF-8 bytes of all texts."""

    tokens: list[list[int]]
    ids: np.ndarray
    text_bytes: int


def cut(tokenizer: tokenizers.Tokenizer, source: sources.Source, width: int, end: Sequence[int] = ()) -> Pieces:
    """Cuts every text, `end` behind it, into pieces of at most `width` tokens, so that no token is lost.

    Raises:
      UserError: when the source has no texts.
    """
    pieces: list[list[int]] = []
    ids: list[int] = []
    text_bytes = 0
    for start, examples in chunks(source, ('text',)):
        texts = [example['text'] for example in examples]
        text_bytes += sum(len(text.encode()) for text in texts)
        for number, tokens in enumerate(tokenizer.encode_all(texts), start):
            whole = [*tokens, *end]
            own = [whole[at : at + width] for at in range(0, len(whole), width)] or [[]]
            pieces += own
            ids += [number] * len(own)
    return Pieces(pieces, np.array(ids), text_bytes)


def place(rows: ragged.Rows, tokens: np.ndarray, packed: bool) -> dict[str, np.ndarray]:
    """Returns the inputs of a model of one stack: tokens and mask, and when packed positions and segment ids."""
    inputs = {'tokens': tokens, 'mask': rows.mask}
    return {**inputs, 'positions': rows.positions, 'segment_ids': rows.segment_ids} if packed else inputs


def teacher_forced(
    streams: Sequence[ragged.Ragged], plan: planner.Batch, packed: bool, start: int, pad: int
) -> dict[str, Any]:
    """Returns the batch of an encoder-decoder, of which `Translation` says what it holds."""
    source, target = (
        ragged.fill_rows(stream, plan.examples, plan.offsets, width, pad)
        for stream, width in zip(streams, plan.widths, strict=True)
    )
    inputs = {
        'source_tokens': source.tokens,
        'target_tokens': target.shifted(start, pad),
        'source_mask': source.mask,
        'target_mask': target.mask,
    }
    if packed:
        inputs |= {
            'source_positions': source.positions,
            'target_positions': target.positions,
            'source_segment_ids': source.segment_ids,
            'target_segment_ids': target.segment_ids,
        }
    return {'inputs': inputs, 'labels': target.tokens, 'weights': target.mask.astype(np.float32)}


def frame_ids(tokenizer: tokenizers.Tokenizer) -> tuple[int, int]:
    """Returns the ids which an encoder of single texts has before and after each.

    Raises:
      UserError: for a vocabulary which has no start id.
    """
    if tokenizer.bos_id < 0:
        raise errors.UserError('the vocabulary has no start id, which stands before every text; train one with bos_id')
    return tokenizer.bos_id, tokenizer.eos_id


def generators(plan: planner.Batch, seed: int) -> Iterator[tuple[int, np.random.Generator]]:
    """Yields each example of a plan with the random numbers of (seed, epoch, example): new ones every epoch."""
    for example in plan.examples.tolist():
        yield example, np.random.default_rng([seed, plan.epoch, example])
