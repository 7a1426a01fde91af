"""The files of one run: what it is, its vocabulary, its numbers and results; a run is never continued as another."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer_jax.checkpoints import lock, steps
from transformer_jax.config import ModelConfig
from transformer_jax.data.tokenizers import MODEL_FILE, Tokenizer, load_tokenizer
from transformer_jax.errors import UserError
from transformer_jax.training.config import Experiment, differences

CONFIG_FILE = 'config.json'
MODEL_CONFIG_FILE = 'model.json'
RESULT_FILE = 'result.json'

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

# What may change between two sittings of one run: it moves no parameter, or (mesh) only their last bits.
FREE_FIELDS = (
    'config.mesh.',
    'config.model.vocab_multiple:',
    'config.training.log_every:',
    'config.training.checkpoint_seconds:',
    'config.training.keep:',
)


class RunDirectory:
    """A directory with config.json, model.json, tokenizer.model, checkpoints/, averaged/, result.json, plots/ ..."""

    def __init__(self, path: str | os.PathLike):
        # A bucket (gs://) can be read; training appends to files, which buckets do not allow.
        whole = steps.absolute(path)
        self._is_bucket = '://' in os.fspath(whole)
        self.path = whole if self._is_bucket else Path(whole)
        if not self._is_bucket and self.path.exists() and not self.path.is_dir():
            raise UserError(f"workdir '{self.path}' is a file; give a directory")
        self.checkpoints = self.path / 'checkpoints'
        self.averaged = self.path / 'averaged'
        self.plots = self.path / 'plots'

    def check(self, experiment: Experiment) -> None:
        """Checks that the directory is new or belongs to this experiment; writes nothing.

        A run may be continued on another mesh, with another interval of log lines or number of checkpoints, and, where
        the schedule does not depend on it, for more steps.

        Raises:
          UserError: with a list of all differences.
        """
        if not (self.path / CONFIG_FILE).exists():
            return
        self.check_same(self.experiment(), experiment)

    def check_same(self, old: Experiment, experiment: Experiment) -> None:
        """Checks that `experiment` may go on from what was trained by `old`.

        Raises:
          UserError: with a list of all differences.
        """
        found = differences(old.to_dict(), experiment.to_dict())
        longer = experiment.training.steps > old.training.steps
        if experiment.optimizer.schedule in ('noam', 'constant') and longer:
            found = [line for line in found if not line.startswith('config.training.steps:')]
        found = [line for line in found if not line.startswith(FREE_FIELDS)]
        if found:
            raise UserError(
                f"workdir '{self.path}' holds a run with another config: {'; '.join(found)}; "
                'give the same config, or another --workdir'
            )

    def write(self, experiment: Experiment, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        """Takes the directory for this process and writes what the run is; done before its first step.

        Raises:
          UserError: if another process has it, or has meanwhile begun another run in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock.acquire(self.path)
        self.check(experiment)
        if tokenizer is not None:
            tokenizer.save(self.path / MODEL_FILE)
        self.write_json(MODEL_CONFIG_FILE, model.to_dict())
        self.write_json(CONFIG_FILE, experiment.to_dict())

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Gives the directory free at the end, and tells in words when there is no room to write in it.

        Raises:
          UserError: for that, or if it is in a bucket.
        """
        if self._is_bucket:
            raise UserError(
                f"workdir '{self.path}' is a bucket, in which no file can grow; mount it (gcsfuse), give a path"
            )
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise UserError(
                f"workdir '{self.path}' cannot be written: {error.strerror}; make room, and the same command goes on "
                'from the newest checkpoint'
            ) from error
        finally:
            lock.release(self.path)

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Writes a JSON file; a reader sees the whole old one or the whole new one."""
        partial = self.path / f'{name}.partial'
        partial.write_text(json.dumps(values, indent=2) + '\n')
        partial.replace(self.path / name)

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns a JSON file of the run.

        Raises:
          UserError: if it is missing or is no JSON.
        """
        path = self.path / name
        if not path.is_file():
            raise UserError(f"'{path}' is not there; give the workdir of a run of experiments.train")
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise UserError(f"'{path}' is no JSON ({error}); restore it, or start anew in another --workdir") from error

    def experiment(self) -> Experiment:
        """Returns the experiment which the run was started with."""
        return Experiment.from_dict(self.read_json(CONFIG_FILE))

    def model_config(self) -> ModelConfig:
        """Returns the architecture as trained, vocabulary and decoding ids filled in."""
        return ModelConfig.from_dict(self.read_json(MODEL_CONFIG_FILE))

    def tokenizer(self) -> Tokenizer | None:
        """Returns the run's vocabulary, or None before there is one, and where examples have no words."""
        return load_tokenizer(self.path) if (self.path / MODEL_FILE).is_file() else None

    def result(self) -> dict[str, Any] | None:
        """Returns the result of a finished run, or None."""
        return self.read_json(RESULT_FILE) if (self.path / RESULT_FILE).is_file() else None
