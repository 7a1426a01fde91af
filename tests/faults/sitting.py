"""One sitting of a tiny run in a forked process, which tells over a pipe what it is doing at every moment."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax.checkpoints import CheckpointManager, manifest, storage
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.errors import UserError
from transformer_jax.training import finish, loop
from transformer_jax.training.compiled import AheadOfTime
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig

PHASES = ('compile', 'step', 'save', 'finalise', 'evaluation')
STEPS, SAVE_EVERY, KEEP = 12, 2, 3
_WORDS = 'open close save print delete the a file page cell row table dialog of in'.split()


def write_texts(directory: Path) -> None:
    """Writes the texts on which every run trains."""
    random = np.random.default_rng(0)
    texts = [' '.join(random.choice(_WORDS, random.integers(2, 8))) for _ in range(40)]
    (directory / 'texts.txt').write_text('\n\n'.join(texts))


def experiment(texts: Path, seed: int = 0) -> Experiment:
    """A decoder of one layer with dropout, a moving average, evaluations and an average of checkpoints at the end."""
    return Experiment(
        name='faults',
        model=ModelConfig(
            kind='decoder', vocab_size=290, d_model=16, d_ff=32, num_layers=1, num_heads=2, head='lm',
            tie_embeddings='output', position='rope', norm_position='pre', layer_stack='unrolled',
        ),
        data=DataConfig(
            objective='causal_lm', train=f'text:{texts}#split', vocab_size=290, source_length=16, target_length=16,
            batch_tokens=256, row_multiple=16, evaluation_rows=8,
        ),
        optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=4),
        training=TrainingConfig(
            steps=STEPS, seed=seed, log_every=1, evaluate_every=3, checkpoint_every=SAVE_EVERY, keep=KEEP,
            ema_decay=0.9, average_last=2,
        ),
    )  # fmt: skip


def import_once() -> None:
    """Imports, before any sitting is forked, what each of them would import."""
    # TensorBoard's writer imports torch where it is installed, which takes longer than a run.
    sys.modules.setdefault('torch', None)  # type: ignore[arg-type]
    importlib.import_module('tensorboardX')
    importlib.import_module('matplotlib.figure')


class _Teller(logging.Handler):
    """Sends [kind, ...] as a line of JSON, at once."""

    def __init__(self, pipe: int):
        super().__init__()
        self._pipe = pipe

    def tell(self, *what: Any) -> None:
        os.write(self._pipe, (json.dumps(what) + '\n').encode())

    def emit(self, record: logging.LogRecord) -> None:
        self.tell('log', record.levelname, record.getMessage())

    def mark(self, phase: str, function: Any) -> Any:
        """Returns `function` which tells when it begins and ends."""

        @functools.wraps(function)
        def marked(*arguments: Any, **keywords: Any) -> Any:
            self.tell('begin', phase, time.monotonic())
            try:
                return function(*arguments, **keywords)
            finally:
                self.tell('end', phase, time.monotonic())

        return marked


def sit(
    pipe: int,
    directory: Path,
    texts: Path,
    programs: Path,
    *,
    cold: bool = False,
    clock_back: bool = False,
    largest_file: int | None = None,
    seed: int = 0,
) -> None:
    """Trains in `directory` until it ends or is ended; the last line told is ['over', how, message].

    Args:
      programs: cache of compiled programs; with `cold` an empty one takes its place.
      clock_back: whether the clock stands years back and goes further back at every look.
      largest_file: bytes beyond which no file can grow from the second save on, as on a full disk or over a quota.
    """
    # Of failed saves, threads of the libraries print tracebacks which nobody can catch.
    os.dup2(os.open(directory.with_name(f'{directory.name}.stderr'), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    teller = _Teller(pipe)
    logging.getLogger().handlers[:] = []
    logger = logging.getLogger('transformer_jax')
    logger.handlers[:], logger.propagate = [teller], False
    logger.setLevel(logging.INFO)
    if cold:
        programs = directory.with_name(f'{directory.name}.programs')
        shutil.rmtree(programs, ignore_errors=True)
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_compilation_cache_dir', str(programs))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    jax.config.update('jax_disable_most_optimizations', True)
    if clock_back:
        _turn_back_the_clock()
    if largest_file is not None:
        _limit_files(largest_file)
    AheadOfTime.compile = teller.mark('compile', AheadOfTime.compile)
    loop.Sitting._take_step = teller.mark('step', loop.Sitting._take_step)
    loop.Sitting._judge = teller.mark('evaluation', loop.Sitting._judge)
    finish._judge = teller.mark('evaluation', finish._judge)
    CheckpointManager.save = teller.mark('save', CheckpointManager.save)
    storage.Writer.wait = teller.mark('save', storage.Writer.wait)
    manifest.write = teller.mark('finalise', manifest.write)
    CheckpointManager._prune = teller.mark('finalise', CheckpointManager._prune)
    try:
        result = loop.train(experiment(texts, seed), str(directory))
        teller.tell('over', 'interrupted' if result.get('interrupted') else 'finished', str(result['step']))
    except UserError as error:
        teller.tell('over', 'refused', str(error))
    except BaseException:
        teller.tell('over', 'crashed', traceback.format_exc())
    os._exit(0)


def _turn_back_the_clock() -> None:
    real = time.time

    def back() -> float:
        return 1e9 - 50 * (real() - begin)

    begin = real()
    time.time, time.time_ns = back, lambda: int(back() * 1e9)


def _limit_files(largest: int) -> None:
    save, calls = CheckpointManager.save, []

    def limited(manager: CheckpointManager, *arguments: Any, **keywords: Any) -> bool:
        calls.append(0)
        if len(calls) == 2:
            manager.wait()  # the first save goes on behind the steps after it
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        return save(manager, *arguments, **keywords)

    CheckpointManager.save = limited
