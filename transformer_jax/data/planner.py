"""Which examples fill which row of step s: pure numpy, from seed, epoch and lengths alone.

Every host computes the same plan, so a batch depends on seed and step and never on the number of hosts, and any step is
found at once. Letters: an example has one length for each of its streams (source and target of a translation).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from transformer_jax import errors
from transformer_jax.data import config as data_config

_FIRST_BUCKET = 16
_PACKED_TOGETHER = 1024


class Batch(NamedTuple):
    """The rows of one step.

    Attributes:
      epoch: number of the epoch, from 0.
      widths: width of a row in each stream.
      examples: (m,) numbers of the examples.
      offsets: (rows + 1,); row r holds `examples[offsets[r]:offsets[r + 1]]`, and an empty stretch is a padding row.
    """

    epoch: int
    widths: tuple[int, ...]
    examples: np.ndarray
    offsets: np.ndarray

    def part(self, index: int, count: int) -> Batch:
        """Returns rows `index * rows / count` up to `(index + 1) * rows / count`: those of host `index` of `count`."""
        rows = (len(self.offsets) - 1) // count
        offsets = self.offsets[index * rows : (index + 1) * rows + 1]
        return self._replace(examples=self.examples[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows of one shape, filled once by length; each epoch puts its own examples into them.

    Attributes:
      widths: width of a row in each stream.
      rows: rows of a batch.
      slots: (m,) an example which fits each slot; examples of equal lengths may trade slots.
      offsets: (R + 1,) row r of the epoch has `slots[offsets[r]:offsets[r + 1]]`.
    """

    widths: tuple[int, ...]
    rows: int
    slots: np.ndarray
    offsets: np.ndarray

    @property
    def filled_rows(self) -> int:
        """Rows of an epoch which hold examples."""
        return len(self.offsets) - 1

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return -(-self.filled_rows // self.rows)

    @property
    def token_slots(self) -> int:
        """Token slots of an epoch's batches, padding rows included."""
        return self.steps * self.rows * sum(self.widths)


class Planner:
    """The plan of a training run.

    An epoch holds every example exactly once and has the same number of steps as every other, so step s is batch
    `s % steps_per_epoch` of epoch `s // steps_per_epoch`. Each epoch shuffles anew: batches, the rows in them and,
    where rows are packed, which examples of equal lengths sit in which row. Rows which do not fill their last batch are
    spread evenly: the batches of one shape differ by at most one real row, and the rest are padding rows.

    Args:
      lengths: (n, streams) tokens of each example.
      widths: width of the widest row in each stream; no length exceeds it.
      config: how to batch.
      seed: seed of the run.

    Raises:
      UserError: when there are no examples.
    """

    def __init__(self, lengths: np.ndarray, widths: tuple[int, ...], config: data_config.DataConfig, seed: int):
        if not len(lengths):
            raise errors.UserError('there are no training examples; raise data.limit or the length limits')
        self.lengths, self.seed = lengths, seed
        order = np.random.default_rng([seed]).permutation(len(lengths))
        make = {'pack': _packed, 'bucket': _bucketed}[config.batching]
        self.groups = make(order, lengths, widths, config)
        self.steps_per_epoch = sum(group.steps for group in self.groups)
        self._alike = _classes(lengths)
        self._epochs: dict[int, list[Batch]] = {}

    @property
    def padding_share(self) -> float:
        """Share of an epoch's token slots which hold no token."""
        return 1 - float(self.lengths.sum()) / sum(group.token_slots for group in self.groups)

    def batch(self, step: int) -> Batch:
        """Returns the plan of step `step`, from 0."""
        epoch, index = divmod(int(step), self.steps_per_epoch)
        return self.epoch(epoch)[index]

    def epoch(self, epoch: int) -> list[Batch]:
        """Returns the batches of an epoch in their order."""
        plan = self._epochs.get(epoch)
        if plan is None:
            plan = self._plan(epoch)
            # Threads which build batches ahead stand on either side of an epoch's end, so two are kept.
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: plan}
        return plan

    def _plan(self, epoch: int) -> list[Batch]:
        random = np.random.default_rng([self.seed, epoch])
        traded = _trade(self._alike, random)
        batches = []
        for group in self.groups:
            filled = traded[group.slots]
            for rows in np.array_split(random.permutation(group.filled_rows), group.steps):
                count = np.zeros(group.rows, np.int64)
                count[: len(rows)] = np.diff(group.offsets)[rows]
                offsets = np.concatenate([[0], np.cumsum(count)])
                examples = np.concatenate([filled[group.offsets[row] : group.offsets[row + 1]] for row in rows])
                batches.append(Batch(epoch, group.widths, examples, offsets))
        return [batches[index] for index in random.permutation(len(batches))]

    def __getstate__(self) -> dict:
        return {**self.__dict__, '_epochs': {}}


def _rows(widths: tuple[int, ...], config: data_config.DataConfig) -> int:
    return config.batch_tokens // sum(widths) // config.row_multiple * config.row_multiple


def _classes(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples in order of their lengths, and for each the number of its class of equal lengths."""
    order = np.lexsort(lengths.T)
    changes = (np.diff(lengths[order], axis=0) != 0).any(axis=1)
    return order, np.concatenate([[0], np.cumsum(changes)])


def _trade(alike: tuple[np.ndarray, np.ndarray], random: np.random.Generator) -> np.ndarray:
    """Returns a permutation which moves examples only among those of the same lengths."""
    order, number = alike
    shuffled = order[np.lexsort((random.random(len(order)), number))]
    traded = np.empty_like(order)
    traded[order] = shuffled
    return traded


def _bucketed(
    order: np.ndarray, lengths: np.ndarray, widest: tuple[int, ...], config: data_config.DataConfig
) -> list[Group]:
    """Groups examples by the first bucket which holds all of their streams."""
    boundaries = _boundaries(max(widest), config)
    bucket = np.searchsorted(boundaries, lengths[order].max(axis=1))
    groups = []
    for index, boundary in enumerate(boundaries):
        slots = order[bucket == index]
        if len(slots):
            widths = tuple(min(int(boundary), width) for width in widest)
            groups.append(Group(widths, _rows(widths, config), slots, np.arange(len(slots) + 1)))
    return groups


def _boundaries(widest: int, config: data_config.DataConfig) -> np.ndarray:
    if config.bucket_boundaries:
        return np.array([*config.bucket_boundaries, widest])
    doublings = [_FIRST_BUCKET]
    while doublings[-1] < widest:
        doublings.append(2 * doublings[-1])
    return np.array([*doublings[:-1], widest])


def _packed(
    order: np.ndarray, lengths: np.ndarray, widths: tuple[int, ...], config: data_config.DataConfig
) -> list[Group]:
    """Packs examples into rows by first fit, longest first.

    The shuffled order is packed a bounded number of examples at a time, so the cost grows with the number of examples.
    """
    rows: list[list[int]] = []
    for start in range(0, len(order), _PACKED_TOGETHER):
        together = order[start : start + _PACKED_TOGETHER]
        longest_first = np.argsort(-(lengths[together] / widths).max(axis=1), kind='stable')
        rows += _first_fit(together[longest_first], lengths, widths, config.pack_limit or len(order))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return [Group(widths, _rows(widths, config), np.concatenate(rows), offsets)]


def _first_fit(order: np.ndarray, lengths: np.ndarray, widths: tuple[int, ...], most: int) -> list[list[int]]:
    """Puts each example into the first row of fewer than `most` in which every stream fits, or into a new one."""
    rows: list[list[int]] = []
    # Streams first, so that the rows of a stream are compared in one sweep.
    room = np.tile(np.array(widths)[:, None], len(order))
    for example, length in zip(order.tolist(), lengths[order][:, :, None], strict=True):
        # The first row which is not opened yet takes part, and always fits.
        place = int((room[:, : len(rows) + 1] >= length).all(axis=0).argmax())
        if place == len(rows):
            rows.append([])
        rows[place].append(example)
        # A full row has no room for even one token.
        room[:, place : place + 1] = room[:, place : place + 1] - length if len(rows[place]) < most else 0
    return rows
