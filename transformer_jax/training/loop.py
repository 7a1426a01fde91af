"""The training loop: resume, step, log, evaluate, save, stop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.checkpoints import CheckpointManager
from transformer_jax.checkpoints.processes import all_true
from transformer_jax.data.sources import open_split
from transformer_jax.errors import UserError
from transformer_jax.models import abstract_params
from transformer_jax.sharding import batch_shardings, place_batch
from transformer_jax.training.compiled import AheadOfTime, shape_key
from transformer_jax.training.config import Experiment
from transformer_jax.training.finish import finish
from transformer_jax.training.flops import training_flops
from transformer_jax.training.metrics import Lagged, MetricsWriter, Window
from transformer_jax.training.run_directory import RunDirectory
from transformer_jax.training.setup import Run, evaluation_params, prepare
from transformer_jax.training.state import TrainState, with_shardings
from transformer_jax.training.step import make_train_step

_logger = logging.getLogger(__name__)

Report = Callable[[int, dict[str, float]], None]


class NotFinite(UserError):
    """Loss or gradient was not finite for too many steps in a row."""


def train(experiment: Experiment, workdir: str, report: Report = lambda step, values: None) -> dict[str, Any]:
    """Trains, or goes on training, in `workdir` and returns the result which is also in its result.json.

    The state comes from the newest intact checkpoint of this directory, else from the seed. Batch, dropout and rate
    are functions of (seed, step), so a run which was killed ends with the same bits as one which was not.
    `report(step, values)` hears every log line: loss, rate, gradient_norm, skipped, tokens_per_second,
    flops_per_second, seconds_per_step, padding_share. The result of a run which SIGTERM stopped is
    {'interrupted': True, 'step'}.

    Raises:
      UserError: for anything in config, data or directory that a user can put right; `NotFinite` when it diverged.
    """
    with RunDirectory(workdir).at_work():
        return _train(experiment, workdir, report)


def _train(experiment: Experiment, workdir: str, report: Report) -> dict[str, Any]:
    run = prepare(experiment, workdir)
    done = run.directory.result()
    if done is not None and done['step'] == experiment.training.steps:
        _logger.info('this run is finished; its result is in %s', run.directory.path)
        return done
    config = experiment.training
    best_mode = 'min' if config.best_metric == 'loss' else 'max'
    with CheckpointManager(run.directory.checkpoints, config.keep, config.best_metric, best_mode) as manager:
        sitting = Sitting(run, manager, report)
        if not sitting.train():
            return {'interrupted': True, 'step': sitting.step}
        manager.wait()
        return finish(run, sitting.evaluator, sitting.state, sitting.seconds)


class Stop:
    """Notices SIGTERM and SIGINT, so that a run can stop between two steps; a second signal ends it at once."""

    def __init__(self):
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(number, self._before[number])


class Sitting:
    """One process's time at a run, from its newest checkpoint or its beginning.

    Attributes:
      state, step: where the run stands.
      evaluator: what judges it.
    """

    def __init__(self, run: Run, manager: CheckpointManager, report: Report):
        self._run, self._manager, self._report = run, manager, report
        self._config = run.experiment.training
        self._began, self._seconds_before = time.monotonic(), 0.0
        self._pipeline = run.train_pipeline()
        self._compile()
        self.evaluator = run.evaluator()
        self.state, self.step = self._start()
        self._writer = MetricsWriter(run.directory.path, self.step, run.is_first)
        self._lagged, self._window = Lagged(), Window()
        self._saved_at = time.monotonic()
        self._judged: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds of all sittings of this run, compilation and evaluation included."""
        return self._seconds_before + time.monotonic() - self._began

    def _compile(self) -> None:
        run, rules = self._run, self._run.experiment.mesh.logical_rules
        words = run.model.config.vocab_size if run.model.config.head == 'lm' else None
        jitted = make_train_step(run.model, run.optimizer, run.schedule, self._config, run.shardings, rules, words)
        self._train_step = AheadOfTime('train step', jitted, keyed_by=1)
        # As an array, so that runs which differ by their seed alone share a cached program; wrapped as key() wraps it.
        seed = np.int64(self._config.seed).astype(np.int32)
        self._seed = jax.device_put(seed, NamedSharding(run.mesh, PartitionSpec()))
        self._flops: dict[Any, int] = {}
        for shapes in self._pipeline.shapes():
            batch = with_shardings(shapes, batch_shardings(shapes, run.mesh, rules))
            self._train_step.compile(run.abstract, batch, self._seed)
            self._flops[shape_key(batch)] = training_flops(run.model, abstract_params(run.model)[0], shapes['inputs'])

    def _start(self) -> tuple[TrainState, int]:
        """Returns state and step: of the run's newest intact checkpoint, else from the seed."""
        if self._manager.latest_step() is None:
            return self._run.init(), 0
        restored = self._run.restore(self._manager)
        saved, own = restored.metadata['tokenizer'], self._run.vocabulary
        if saved != own:
            raise UserError(
                f'checkpoint {restored.step} was trained with vocabulary {saved}, but {self._run.directory.path} now '
                f'has {own}; put the old tokenizer.model back'
            )
        # config.json may have been lost; what was trained is in the checkpoint too.
        trained = Experiment.from_dict(restored.metadata['experiment'])
        self._run.directory.check_same(trained, self._run.experiment)
        _logger.info('going on from the checkpoint of step %d', restored.step)
        self._seconds_before = restored.metadata['seconds']
        return restored.state, restored.step

    def train(self) -> bool:
        """Trains up to the last step and returns True, or saves and returns False when it is asked to stop."""
        batches = self._pipeline.iterate(self.step)
        self._window.reset()
        with Stop() as stop:
            try:
                while self.step < self._config.steps:
                    self._take_step(next(batches))
                    asked = self._agreed(stop.asked)
                    self._pause(asked)
                    if asked:
                        _logger.warning('stopped on request at step %d; the same command goes on from here', self.step)
                        return False
                return True
            finally:
                batches.close()
                self._writer.close()

    def _take_step(self, batch: dict[str, Any]) -> None:
        batch = place_batch(batch, self._run.mesh, self._run.experiment.mesh.logical_rules)
        with jax.transfer_guard('disallow'):
            self.state, metrics = self._train_step(self.state, batch, self._seed)
        self.step += 1
        self._read(self._lagged.push(self.step, {**metrics, 'flops': self._flops[shape_key(batch)]}))

    def _read(self, earlier: tuple[int, dict[str, float]] | None) -> None:
        """Looks at the numbers of a step which is done: the window, the log line, and whether to give up."""
        if earlier is None:
            return
        step, metrics = earlier
        self._window.add(metrics)
        if metrics['skipped_in_row']:
            loss, norm = metrics['loss'], metrics['gradient_norm']
            _logger.warning('step %d skipped: loss %s, gradient norm %s', step, loss, norm)
        if metrics['skipped_in_row'] >= self._config.nonfinite_limit:
            raise NotFinite(
                f'loss or gradient was not finite for {self._config.nonfinite_limit} steps in a row; stopped at step '
                f'{step}, learning rate {metrics["rate"]:.3g}, batch of seed {self._config.seed} and step {step - 1}; '
                f'lower optimizer.learning_rate or set optimizer.clip_norm; checkpoints up to step '
                f'{self._manager.latest_step() or 0} are intact'
            )
        if step % self._config.log_every == 0 or step == self._config.steps:
            values = {**self._window.summary(), 'padding_share': self._pipeline.padding_share}
            self._writer.write(step, values, 'train')
            self._report(step, values)
            self._window.reset()

    def _pause(self, asked: bool) -> None:
        """Evaluates and saves where that is due; the device is idle meanwhile and the window does not count it."""
        config, last = self._config, self.step == self._config.steps
        evaluate = last or self.step % config.evaluate_every == 0
        bleu = config.bleu_every is not None and self.step % config.bleu_every == 0
        late = config.checkpoint_seconds is not None and time.monotonic() - self._saved_at > config.checkpoint_seconds
        save = last or self.step % config.checkpoint_every == 0 or self._agreed(late) or asked
        if not (evaluate or bleu or save):
            return
        self._read(self._lagged.flush())
        begin = time.perf_counter()
        if evaluate or bleu:
            self._judge(bleu)
        if save:
            self._save()
        self._window.leave_out(time.perf_counter() - begin)

    def _judge(self, bleu: bool) -> None:
        source = self._run.valid_source
        if source is None:
            return
        params = evaluation_params(self.state)
        self._judged = self.evaluator.loss(params, source)
        if bleu:
            data = self._run.experiment.data.replace(evaluation_limit=self._config.bleu_sentences)
            self._judged['bleu'] = self.evaluator.scores(params, open_split(data, 'valid'))[0].bleu
        self._writer.write(self.step, self._judged, 'valid')
        shown = ', '.join(f'{name} {value:.4g}' for name, value in self._judged.items())
        _logger.info('step %d, validation: %s', self.step, shown)

    def _save(self) -> None:
        metadata = {
            'experiment': self._run.experiment.to_dict(),
            'tokenizer': self._run.vocabulary,
            'data': {'seed': self._config.seed, 'step': self.step},
            'seconds': self.seconds,
            'metrics': self._judged,
        }
        self._manager.save(self.step, self.state, metadata)
        self._judged, self._saved_at = {}, time.monotonic()

    def _agreed(self, wish: bool) -> bool:
        """Returns whether any process wishes it; several processes ask each other only at log lines."""
        if jax.process_count() == 1:
            return wish
        return self.step % self._config.log_every == 0 and not all_true(not wish)
