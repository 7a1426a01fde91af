"""Token sequences of unequal length in two flat arrays, and rows which are filled from them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Sequences laid end to end: sequence i is `tokens[offsets[i]:offsets[i + 1]]`.

    Attributes:
      tokens: (sum of lengths,) int32.
      offsets: (n + 1,) int64.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def join(cls, sequences: Iterable[Sequence[int]]) -> Ragged:
        """Lays `sequences` end to end."""
        sequences = list(sequences)
        offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)
        tokens = np.fromiter(itertools.chain.from_iterable(sequences), np.int32, offsets[-1])
        return cls(tokens, offsets)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """Joins the sequences of `parts`, in their order."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.tokens for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of the sequences, (n,)."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows filled with sequences, one after the other; arrays are (rows, width).

    Attributes:
      tokens: int32, `pad` where there is no sequence.
      positions: int32, from 0 again in each sequence; 0 where there is none.
      segment_ids: int32, 1 for the first sequence of a row, then 2, 3, ...; 0 where there is none.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """1 where there is a token, int32."""
        return (self.segment_ids > 0).astype(np.int32)

    def shifted(self, start: int, pad: int) -> np.ndarray:
        """Returns the tokens one place to the right inside each sequence, `start` in front of it: decoder inputs."""
        before = np.pad(self.tokens[:, :-1], ((0, 0), (1, 0)))
        inputs = np.where(self.positions == 0, start, before)
        return np.where(self.segment_ids > 0, inputs, pad).astype(np.int32)


def fill_rows(sequences: Ragged, chosen: np.ndarray, offsets: np.ndarray, width: int, pad: int) -> Rows:
    """Fills rows with chosen sequences.

    Args:
      sequences: all sequences.
      chosen: numbers of the sequences to place.
      offsets: row r gets `chosen[offsets[r]:offsets[r + 1]]`, in this order; an empty stretch gives an empty row.
      width: tokens in a row.
      pad: id of places which stay empty.

    Raises:
      ValueError: when a row's sequences do not fit.
    """
    count = np.diff(offsets)
    row = np.repeat(np.arange(len(count)), count)
    segment = np.arange(len(chosen)) - np.repeat(offsets[:-1] - offsets[0], count) + 1
    lengths = sequences.lengths[chosen]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # A sequence's column is what the row held before it: all tokens placed so far less those of the rows above.
    above = np.concatenate([[0], ends])[offsets[:-1] - offsets[0]]
    column = starts - above[row]
    if len(chosen) and (column + lengths).max() > width:
        raise ValueError(f'{(column + lengths).max()} tokens do not fit into a row of {width}')
    position = np.arange(ends[-1] if len(ends) else 0) - np.repeat(starts, lengths)
    source = np.repeat(sequences.offsets[chosen], lengths) + position
    place = np.repeat(row * width + column, lengths) + position
    rows = Rows(*(np.full((len(count), width), value, np.int32) for value in (pad, 0, 0)))
    rows.tokens.reshape(-1)[place] = sequences.tokens[source]
    rows.positions.reshape(-1)[place] = position
    rows.segment_ids.reshape(-1)[place] = np.repeat(segment, lengths)
    return rows
