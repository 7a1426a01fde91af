"""Where numbers go: read one step late, gathered over a window, written to JSONL and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

_log = logging.getLogger(__name__)

METRICS_FILE = 'metrics.jsonl'
# Metrics of a step which are no auxiliary losses.
_OWN = ('loss', 'weight', 'rate', 'gradient_norm', 'skipped', 'skipped_in_row', 'flops')


class Lagged:
    """Holds back the metrics of the step just dispatched, so that reading numbers never stalls the device.

    While step n runs, `push` fetches those of step n - 1, which is done or about to be.
    """

    def __init__(self):
        self._held: tuple[int, dict[str, jax.typing.ArrayLike]] | None = None

    def push(self, step: int, metrics: dict[str, jax.typing.ArrayLike]) -> tuple[int, dict[str, float]] | None:
        """Takes the metrics of `step`; returns the step pushed before it with its numbers, if there was one."""
        earlier = self.flush()
        self._held = step, metrics
        return earlier

    def flush(self) -> tuple[int, dict[str, float]] | None:
        """Returns the step held back with its numbers, waiting for it; None if there is none."""
        if self._held is None:
            return None
        (step, metrics), self._held = self._held, None
        return step, {name: np.asarray(value).item() for name, value in jax.device_get(metrics).items()}


class Window:
    """Means and speeds since the last line of the log."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Starts a new window now."""
        self._start = time.perf_counter()
        self._loss = self._tokens = self._flops = 0.0
        self._aux: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._steps = self._counted = 0

    def leave_out(self, seconds: float) -> None:
        """Leaves out time in which no step ran, such as that of an evaluation."""
        self._start += seconds

    def add(self, metrics: dict[str, float]) -> None:
        """Adds one step's numbers, its model FLOPs among them; a step which was skipped has no loss to average."""
        if metrics['skipped_in_row'] == 0:
            self._loss += metrics['loss'] * metrics['weight']
            self._tokens += metrics['weight']
            self._counted += 1
            for name in metrics.keys() - set(_OWN):
                self._aux[name] = self._aux.get(name, 0.0) + metrics[name]
        self._flops += metrics['flops']
        self._steps += 1
        self._last = metrics

    def summary(self) -> dict[str, float]:
        """Returns loss (token mean, nats), auxiliary losses (step mean), last rate, gradient norm, skipped, speeds."""
        seconds = time.perf_counter() - self._start
        return {
            'loss': self._loss / self._tokens if self._tokens else math.nan,
            **{name: self._aux[name] / self._counted for name in sorted(self._aux)},
            **{name: self._last[name] for name in ('rate', 'gradient_norm', 'skipped')},
            'tokens_per_second': self._tokens / seconds,
            'flops_per_second': self._flops / seconds,
            'seconds_per_step': seconds / self._steps,
        }


class MetricsWriter:
    """Appends numbers to `metrics.jsonl` and to TensorBoard files in a run directory.

    Lines of steps after `start_step` are dropped when it opens: they belong to work which a killed run did after its
    last checkpoint and which is now done again. A writer made with `active=False` (any process but the first) does
    nothing.
    """

    def __init__(self, directory: Path, start_step: int = 0, active: bool = True):
        self._file = self._board = None
        if not active:
            return
        from tensorboardX import SummaryWriter

        path = Path(directory) / METRICS_FILE
        kept = [line for line in read_lines(path) if line['step'] <= start_step]
        partial = path.with_suffix('.partial')
        partial.write_text(''.join(json.dumps(line) + '\n' for line in kept))
        os.replace(partial, path)
        self._file = path.open('a')
        purge_step = start_step + 1 if start_step else None
        self._board = SummaryWriter(str(Path(directory) / 'tensorboard'), purge_step=purge_step)

    def write(self, step: int, values: dict[str, Any], prefix: str) -> None:
        """Writes numbers under `prefix/name`; numbers which are not finite become null in the JSONL."""
        if self._file is None:
            return
        named = {f'{prefix}/{name}': float(value) for name, value in values.items()}
        line = {'step': step, **{name: value if math.isfinite(value) else None for name, value in named.items()}}
        self._file.write(json.dumps(line) + '\n')
        self._file.flush()
        for name, value in named.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is buffered."""
        if self._file is not None:
            self._file.close()
            self._board.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file; left out are a last line cut short by a kill and, told, others."""
    lines, bad = [], []
    texts = path.read_bytes().splitlines() if path.exists() else []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            lines.append({**line, 'step': int(line['step'])})
        except (ValueError, KeyError, TypeError):  # UnicodeDecodeError is a ValueError.
            bad.append(number)
    if bad not in ([], [len(texts)]):
        _log.warning('left out of %s: lines which are no numbers of a step, %s', path, ', '.join(map(str, bad)))
    return lines
