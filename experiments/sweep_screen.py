"""What a person sees of a sweep: the table of its runs, and on a terminal the same table live, with the time left."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from experiments.screen import duration, quantity
from transformer_jax.sweeps.cost import Cost
from transformer_jax.sweeps.plan import PlannedRun
from transformer_jax.sweeps.runner import BEGUN, BUSY, ENDED, RUNNING, status

SECONDS_BETWEEN_LINES = 30.0


def run_table(runs: Sequence[PlannedRun], costs: Mapping[str, Cost], seconds_per_flop: float) -> str:
    """Returns the table of --dry_run: number, arm, seed, parameters, FLOPs, expected time and status of each run."""
    rows = [('run', 'variant', 'seed', 'parameters', 'FLOPs', 'FLOPs/token', 'time', 'status')]
    total = 0.0
    for run in runs:
        cost = costs[run.variant]
        seconds, now = cost.flops * seconds_per_flop, status(run.directory)
        total += 0 if now in ENDED else seconds
        rows.append((str(run.index), run.variant, str(run.seed), f'{cost.parameters:,}', quantity(cost.flops),
                     quantity(cost.flops_per_slot), duration(seconds), now))  # fmt: skip
    steps = sorted({run.experiment.training.steps for run in runs})
    left = f'{len(runs)} runs of {" or ".join(f"{n:,}" for n in steps)} steps, {duration(total)} left to do'
    return '\n'.join([_aligned(rows), left])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return '\n'.join('  '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


class SweepScreen:
    """The table of a sweep's runs, redrawn in place on a terminal; elsewhere a line for each change, and at times one
    for the run which is going on.
    """

    def __init__(self, runs: Sequence[PlannedRun], costs: Mapping[str, Cost], stream: TextIO = sys.stdout):
        self._runs, self._flops, self._stream = list(runs), {name: cost.flops for name, cost in costs.items()}, stream
        self._live, self._height = stream.isatty(), 0
        self._rows: dict[int, tuple[str, int, str]] = {run.index: (status(run.directory), 0, '') for run in runs}
        # FLOPs done while this process looked on, and since when it does: their pace gives the time left.
        self._done, self._begin, self._printed = 0.0, time.monotonic(), 0.0

    def message(self, text: str) -> None:
        """Prints lines which stay, above the table; elsewhere than on a terminal only warnings of a run."""
        if self._live:
            self._erase()
        if not self._live and text.startswith('warning'):
            print(text, file=self._stream, flush=True)

    def watch(self, run: PlannedRun, now: str, step: int, values: dict[str, float]) -> None:
        """Hears of a run what `run_all` tells, and shows it."""
        before, reached, shown = self._rows[run.index]
        steps = run.experiment.training.steps
        if before == RUNNING and 0 < reached < step:
            self._done += self._flops[run.variant] * (step - reached) / steps
        loss = f'{values["loss"]:.3f}' if 'loss' in values else shown
        self._rows[run.index] = now, step, loss
        if self._live:
            self._erase()
            self._draw()
        elif now != RUNNING or step == 0 or time.monotonic() - self._printed > SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            print(f'run {run.index}  {run.variant}, seed {run.seed}: {now}  step {step}/{steps}  loss {loss or "-"}  '
                  f'{self._summary()}', file=self._stream, flush=True)  # fmt: skip

    def _summary(self) -> str:
        ended = sum(state in ENDED for state, _, _ in self._rows.values())
        return f'[{ended}/{len(self._runs)} ended, left {self._left()}]'

    def _left(self) -> str:
        """Returns the expected time of what is left, by the pace so far, compilation and evaluation included."""
        left = sum(
            self._flops[run.variant] * (1 - self._rows[run.index][1] / run.experiment.training.steps)
            for run in self._runs
            if self._rows[run.index][0] not in (*ENDED, BUSY)
        )
        return duration(left * (time.monotonic() - self._begin) / self._done) if self._done else 'unknown'

    def _draw(self) -> None:
        rows = [('run', 'variant', 'seed', 'status', 'step', 'loss')]
        current = next((i for i, run in enumerate(self._runs) if self._rows[run.index][0] in (RUNNING, BEGUN)), 0)
        size = shutil.get_terminal_size()
        room = max(size.lines - 4, 3)
        first = max(0, min(current - room // 2, len(self._runs) - room))
        for run in self._runs[first : first + room]:
            state, step, loss = self._rows[run.index]
            shown = f'{step}/{run.experiment.training.steps}' if step else ''
            rows.append((str(run.index), run.variant, str(run.seed), state, shown, loss))
        lines = [line[: size.columns - 1] for line in [*_aligned(rows).split('\n'), self._summary()]]
        print('\n'.join(lines), file=self._stream, flush=True)
        self._height = len(lines)

    def _erase(self) -> None:
        if self._height:
            print(f'\x1b[{self._height}A\x1b[J', end='', file=self._stream)
            self._height = 0
