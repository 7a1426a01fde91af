"""What a model has to do with an example: how it becomes token sequences, and how rows of them become a batch.

Planner and pipeline know an objective only by the lengths of its token streams.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import planner, ragged, sources, tokenizers

_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a split as tokens.

    Attributes:
      streams: one `Ragged` for each token stream, end marks included.
      ids: (n,) number of each example in its source.
      total: examples of the source.
      truncated: examples which were cut to the length limit.
      too_long: examples left out because they exceed it.
      empty: examples left out because a side has no text.
    """

    streams: tuple[ragged.Ragged, ...]
    ids: np.ndarray
    total: int
    truncated: int
    too_long: int
    empty: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example in each stream, (n, streams)."""
        return np.stack([stream.lengths for stream in self.streams], axis=1)


class Objective(Protocol):
    """What a pipeline asks of an objective.

    Attributes:
      widths: width of the widest row in each token stream; no encoded example is longer.
    """

    widths: tuple[int, ...]

    def encode(self, source: sources.Source, training: bool) -> Examples:
        """Turns the examples of `source` into tokens; all of them stay when not `training`."""

    def batch(self, examples: Examples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        """Builds the batch {'inputs', 'labels', 'weights'} of a plan's rows.

        An objective which draws at random does so from (seed, plan.epoch, example), so that hosts agree.
        """


class Translation:
    """Source to target, teacher-forced: the decoder reads the start id and y_1 ... y_n and learns y_1 ... y_n and EOS.

    A batch holds, with S and T the widths of its rows:
      inputs: source_tokens BS (each sentence ends with EOS), target_tokens BT (labels shifted right inside each
        sentence, the decoder start id in front), source_mask BS and target_mask BT (1 at tokens); when packed, also
        source_positions, target_positions (from 0 in each sentence) and source_segment_ids, target_segment_ids (pairs
        of a row numbered from 1, 0 at padding). All int32.
      labels: BT int32, `pad_id` at padding.
      weights: BT float32, 1 at labels (EOS included), 0 at padding.

    Training leaves out pairs with an empty side; evaluation keeps them, with EOS alone on that side. Both are counted.

    Raises:
      UserError: for decoder_start 'bos' with a vocabulary which has no start id.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, config: data_config.DataConfig):
        self._tokenizer = tokenizer
        self.widths = (config.source_length, config.target_length)
        self._too_long = config.too_long
        self.decoder_start_id = decoder_start_id(tokenizer, config)

    def encode(self, source: sources.Source, training: bool) -> Examples:
        chunks: tuple[list[ragged.Ragged], list[ragged.Ragged]] = ([], [])
        ids, truncated, too_long, empty = [], 0, 0, 0
        for start in range(0, len(source), _CHUNK):
            pairs = [source[index] for index in range(start, min(start + _CHUNK, len(source)))]
            tokens = [self._tokenizer.encode_all([pair[side] for pair in pairs]) for side in ('source', 'target')]
            lengths = np.array([[len(sequence) + 1 for sequence in side] for side in tokens])
            blank = (lengths == 1).any(axis=0)
            long = (lengths > np.array(self.widths)[:, None]).any(axis=0)
            keep = np.ones(len(pairs), bool)
            if training:
                keep &= ~blank
                empty += int(blank.sum())
                if self._too_long == 'skip':
                    too_long += int((keep & long).sum())
                    keep &= ~long
            truncated += int((keep & long).sum())
            kept = np.flatnonzero(keep)
            ids.append(kept + start)
            for side, limit, chunk in zip(tokens, self.widths, chunks, strict=True):
                chunk.append(ragged.Ragged.join(side[i][: limit - 1] + [self._tokenizer.eos_id] for i in kept))
        if not ids:
            raise errors.UserError(f"'{source.name}' has no examples")
        streams = tuple(ragged.Ragged.concatenate(chunk) for chunk in chunks)
        return Examples(streams, np.concatenate(ids), len(source), truncated, too_long, empty)

    def batch(self, examples: Examples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        del seed  # Nothing is drawn at random.
        pad = self._tokenizer.pad_id
        source, target = (
            ragged.fill_rows(stream, plan.examples, plan.offsets, width, pad)
            for stream, width in zip(examples.streams, plan.widths, strict=True)
        )
        inputs = {
            'source_tokens': source.tokens,
            'target_tokens': target.shifted(self.decoder_start_id, pad),
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


def decoder_start_id(tokenizer: tokenizers.Tokenizer, config: data_config.DataConfig) -> int:
    """Returns the first id which a decoder reads, in training and in search.

    Raises:
      UserError: for decoder_start 'bos' with a vocabulary which has no start id.
    """
    start = {'bos': tokenizer.bos_id, 'pad': tokenizer.pad_id}[config.decoder_start]
    if start < 0:
        raise errors.UserError("the vocabulary has no start id; choose data.decoder_start='pad'")
    return start


OBJECTIVES = {'translation': Translation}


def make_objective(config: data_config.DataConfig, tokenizer: tokenizers.Tokenizer) -> Objective:
    """Builds the objective which `config` names.

    Raises:
      UserError: for an unknown name.
    """
    return OBJECTIVES[errors.choose('data.objective', config.objective, OBJECTIVES)](tokenizer, config)
