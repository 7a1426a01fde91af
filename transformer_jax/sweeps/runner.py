"""Runs the runs of a sweep one after another; each is an ordinary run directory which goes on where it was stopped."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from transformer_jax.checkpoints.lock import acquire, release
from transformer_jax.errors import UserError
from transformer_jax.sweeps.plan import PlannedRun
from transformer_jax.training.loop import NotFinite, train
from transformer_jax.training.run_directory import CONFIG_FILE, RunDirectory

_logger = logging.getLogger(__name__)

FAILURE_FILE = 'failure.json'
PROGRAMS_FOLDER = 'programs'

# What a run can be. A diverged run is a result; a failed one is tried again on demand.
NEW, BEGUN, RUNNING, BUSY, FINISHED, DIVERGED, FAILED = (
    'new', 'begun', 'running', 'busy', 'finished', 'diverged', 'failed',
)  # fmt: skip
ENDED = (FINISHED, DIVERGED, FAILED)

Watch = Callable[[PlannedRun, str, int, dict[str, float]], None]


def status(directory: Path) -> str:
    """Returns what the files of a run directory say of the run: 'new', 'begun', 'finished', 'diverged' or 'failed'."""
    if RunDirectory(directory).result() is not None:
        return FINISHED
    if (Path(directory) / FAILURE_FILE).is_file():
        return failure(directory)['status']
    return BEGUN if (Path(directory) / CONFIG_FILE).is_file() else NEW


def failure(directory: Path) -> dict[str, Any]:
    """Returns why a run ended without a result: {'status', 'step', 'message'}."""
    return json.loads((Path(directory) / FAILURE_FILE).read_text())


def share_programs(workdir: Path) -> None:
    """Keeps compiled programs in the sweep's directory, so that runs of equal shapes compile once, in any process.

    Seeds are no part of a program; what an arm changes in the model, the optimizer or the batch is. A cache which the
    user has set stays.
    """
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update('jax_compilation_cache_dir', os.fspath(Path(workdir).absolute() / PROGRAMS_FOLDER))
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def run_all(
    runs: Sequence[PlannedRun], retry: bool = False, watch: Watch = lambda run, status, step, values: None
) -> bool:
    """Trains the runs which have not ended and returns whether all have; False means that it was asked to stop.

    A run which fails leaves failure.json in its directory, and the next one starts. `watch(run, status, step, values)`
    hears of each run's status, and of each log line while it is running.

    Args:
      retry: try failed and diverged runs again, from their newest checkpoint.
    """
    for run in runs:
        now = status(run.directory)
        if now == FINISHED or (now in ENDED and not retry):
            watch(run, now, run.experiment.training.steps, {})
            continue
        run.directory.mkdir(parents=True, exist_ok=True)
        try:
            acquire(epath.Path(run.directory))
        except UserError:
            watch(run, BUSY, 0, {})
            continue
        try:
            ended = _train(run, watch)
        finally:
            release(epath.Path(run.directory))
        if not ended:
            return False
    return True


def _train(run: PlannedRun, watch: Watch) -> bool:
    step, begin = 0, time.monotonic()

    def report(now: int, values: dict[str, float]) -> None:
        nonlocal step
        step = now
        watch(run, RUNNING, now, values)

    watch(run, RUNNING, 0, {})
    file = run.directory / FAILURE_FILE
    file.unlink(missing_ok=True)
    try:
        result = train(run.experiment, os.fspath(run.directory), report)
    except Exception as error:  # one broken run must not keep the others from running; KeyboardInterrupt passes
        what = DIVERGED if isinstance(error, NotFinite) else FAILED
        message = ' '.join(f'{type(error).__name__}: {error}'.split())
        _logger.warning('%s, seed %d %s: %s', run.variant, run.seed, what, message)
        file.write_text(json.dumps({'status': what, 'step': step, 'message': message}) + '\n')
        watch(run, what, step, {})
        return True
    if result.get('interrupted'):
        watch(run, BEGUN, result['step'], {})
        return False
    watch(run, FINISHED, result['step'], {'seconds': time.monotonic() - begin, 'loss': result['valid']['loss']})
    return True
