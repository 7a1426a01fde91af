"""Batches by step for training and evaluation; the one file which imports Grain."""

from __future__ import annotations

import collections
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import objectives, planner, sources, tokenizers

Batch = dict[str, Any]

_THREADS = 1
_logger = logging.getLogger(__name__)


class _Steps:
    """Batches from `start` to `stop` as the random access source which Grain reads."""

    def __init__(self, batch: Callable[[int], Batch], start: int, stop: int):
        self._batch, self._start, self._stop = batch, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Batch:
        return self._batch(self._start + index)


def _read(batch: Callable[[int], Batch], start: int, stop: int, config: data_config.DataConfig) -> Iterator[Batch]:
    """Yields batch(start), batch(start + 1), ... in this order, built ahead by a thread or by worker processes."""
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=config.prefetch)
    dataset = grain.MapDataset.source(_Steps(batch, start, stop)).to_iter_dataset(options)
    if config.workers:
        if not flags.FLAGS.is_parsed():
            # Grain's worker processes read absl flags, which a notebook never parses.
            flags.FLAGS.mark_as_parsed()
        buffer = -(-config.prefetch // config.workers)
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(config.workers, per_worker_buffer_size=buffer))
    batches = iter(dataset)
    try:
        for item in batches:
            # What comes from a worker lies in its shared memory, which goes when the worker does.
            yield jax.tree.map(np.array, item) if config.workers else item
    finally:
        batches.close()


def _check_hosts(rows: int, field: str, process_index: int, process_count: int) -> None:
    if not 0 <= process_index < process_count:
        raise errors.UserError(f'process {process_index} of {process_count} does not exist; count processes from 0')
    if rows % process_count:
        raise errors.UserError(
            f'a batch of {rows} rows does not divide over {process_count} hosts; '
            f'make {field} a multiple of {process_count}'
        )


def _shapes(batch: Batch, process_count: int) -> Batch:
    """Returns shapes and types of the global batch of which `batch` is one host's part."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] * process_count, *x.shape[1:]), x.dtype), batch)


def _encode(objective: objectives.Objective, source: sources.Source, training: bool) -> tuple[objectives.Examples, str]:
    """Returns the examples of `source`, and what happened on the way to them as a line for the log."""
    begin = time.perf_counter()
    examples = objective.encode(source, training)
    seconds = time.perf_counter() - begin
    line = f'{source.name} {" -> ".join(source.languages)}: {len(examples.ids):,} of {examples.total:,} examples'
    if examples.streams:
        mean = ' + '.join(f'{length:.1f}' for length in examples.lengths.mean(axis=0)) if len(examples.ids) else '0'
        line += (
            f', {mean} tokens each, {examples.truncated} cut, {examples.too_long} too long and left out, '
            f'{examples.empty} empty and left out; tokenised in {seconds:.1f} s'
        )
    return examples, line


class TrainPipeline:
    """Training batches as a function of (seed, step), for any number of hosts.

    Args:
      source: the training examples.
      tokenizer: their vocabulary, None where they are no texts; its fingerprint is logged.
      objective: what becomes of an example.
      config: how examples are batched.
      seed: seed of the order.
      process_index: number of this host, from 0; it builds only its own rows.
      process_count: number of hosts.

    Attributes:
      steps_per_epoch: steps in which every example is seen exactly once.
      num_examples: examples of an epoch.
      tokens_per_epoch: weighted labels of an epoch, the last stream's tokens.
      padding_share: share of an epoch's token slots, source and target, which hold no token.

    Raises:
      UserError: when a batch does not divide over the hosts, or no examples are left.
    """

    def __init__(
        self,
        source: sources.Source,
        tokenizer: tokenizers.Tokenizer | None,
        objective: objectives.Objective,
        config: data_config.DataConfig,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._objective, self._config, self._seed = objective, config, seed
        self._process = (process_index, process_count)
        self._examples, line = _encode(objective, source, training=True)
        self._planner = planner.Planner(self._examples.lengths, objective.widths, config, seed)
        for group in self._planner.groups:
            _check_hosts(group.rows, 'data.row_multiple', process_index, process_count)
        self.steps_per_epoch = self._planner.steps_per_epoch
        self.padding_share = self._planner.padding_share
        self.num_examples = len(self._examples.ids)
        self.tokens_per_epoch = int(self._examples.lengths[:, -1].sum())
        vocabulary = '' if tokenizer is None else f'; vocabulary {tokenizer.vocab_size} ({tokenizer.fingerprint})'
        self._line = line + vocabulary
        _logger.info(self.describe())

    def batch(self, step: int) -> Batch:
        """Returns this host's rows of the batch of step `step`: {'inputs', 'labels', 'weights'}, numpy arrays."""
        plan = self._planner.batch(step).part(*self._process)
        return self._objective.batch(self._examples, plan, self._config.batching == 'pack', self._seed)

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """Yields the batches of steps start_step, start_step + 1, ... without end, built ahead.

        Nothing but the step is needed to go on: batches which were built ahead and not used are built again.
        """
        return _read(self.batch, start_step, sys.maxsize, self._config)

    def example_ids(self, step: int) -> list[np.ndarray]:
        """Returns for each row of the global batch of step `step` the numbers of its examples in the source."""
        plan = self._planner.batch(step)
        return np.split(self._examples.ids[plan.examples], plan.offsets[1:-1])

    def epoch(self, step: int) -> int:
        """Returns the number of the epoch, from 0, in which step `step` lies."""
        return int(step) // self.steps_per_epoch

    def shapes(self) -> list[Batch]:
        """Returns the shapes and types of every kind of global batch: one when packed, else one for each bucket."""
        return [shapes for shapes, _ in self.steps_by_shape()]

    def steps_by_shape(self) -> list[tuple[Batch, int]]:
        """Returns each of `shapes` and the number of steps of an epoch which have it."""
        found, steps = {}, collections.Counter()
        for plan in self._planner.epoch(0):
            steps[plan.widths] += 1
            if plan.widths not in found:
                part = plan.part(*self._process)
                batch = self._objective.batch(self._examples, part, self._config.batching == 'pack', self._seed)
                found[plan.widths] = _shapes(batch, self._process[1])
        return [(found[widths], steps[widths]) for widths in sorted(found)]

    def describe(self) -> str:
        """Returns one line on examples, losses on the way, batch shapes and padding."""
        shapes = ', '.join(f'{group.rows} x {"+".join(map(str, group.widths))}' for group in self._planner.groups)
        return (
            f'{self._line}; {self._config.batching} into batches of {shapes}, {self.steps_per_epoch:,} steps an epoch, '
            f'{100 * self.padding_share:.1f} % padding'
        )


class EvaluationPipeline:
    """Every example exactly once in batches of one shape, whatever the batch size and the number of hosts.

    Examples are ordered by length, so that a batch's sentences end together; `example_ids` B, int32, gives their
    numbers in the source and -1 in the padding rows of the last batch, whose weights are 0. Every host has the same
    number of batches. Examples above the length limits are cut and counted, never left out.

    Args:
      source: the examples.
      tokenizer: their vocabulary.
      objective: what becomes of an example.
      config: `evaluation_rows` rows of the global batch, and the length limits.
      process_index: number of this host, from 0.
      process_count: number of hosts.

    Attributes:
      source: the examples, for references.
      examples: the same as tokens.
      num_examples: how many these are.

    Raises:
      UserError: when a batch does not divide over the hosts.
    """

    def __init__(
        self,
        source: sources.Source,
        tokenizer: tokenizers.Tokenizer | None,
        objective: objectives.Objective,
        config: data_config.DataConfig,
        process_index: int = 0,
        process_count: int = 1,
    ):
        _check_hosts(config.evaluation_rows, 'data.evaluation_rows', process_index, process_count)
        self.source, self._objective, self._config = source, objective, config
        self._process = (process_index, process_count)
        self.examples, self._line = _encode(objective, source, training=False)
        self.num_examples = len(self.examples.ids)
        self._order = np.lexsort(self.examples.lengths.T[::-1])
        _logger.info(self.describe())

    def __len__(self) -> int:
        return -(-self.num_examples // self._config.evaluation_rows)

    def batch(self, step: int) -> Batch:
        """Returns this host's rows of batch `step`: {'inputs', 'labels', 'weights', 'example_ids'}.

        Raises:
          IndexError: past the last batch.
        """
        if not 0 <= step < len(self):
            raise IndexError(f'batch {step} of {len(self)}')
        rows = self._config.evaluation_rows
        chosen = self._order[step * rows : (step + 1) * rows]
        offsets = np.minimum(np.arange(rows + 1), len(chosen))
        plan = planner.Batch(0, self._objective.widths, chosen, offsets).part(*self._process)
        ids = np.full(len(plan.offsets) - 1, -1, np.int32)
        ids[: len(plan.examples)] = self.examples.ids[plan.examples]
        return {**self._objective.batch(self.examples, plan, packed=False, seed=0), 'example_ids': ids}

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            yield self.batch(step)

    def shapes(self) -> list[Batch]:
        """Returns the shapes and types of the global batch, as a list of one."""
        return [_shapes(self.batch(0), self._process[1])]

    def describe(self) -> str:
        """Returns one line on examples, losses on the way and the batch's shape."""
        return f'{self._line}; {len(self)} batches of {self._config.evaluation_rows} rows'
