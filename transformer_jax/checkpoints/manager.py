"""CheckpointManager: saves in the background, keeps the newest and the best, restores the newest intact step."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import platform
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from transformer_jax.checkpoints import lock, manifest, names, processes, steps, storage
from transformer_jax.errors import UserError, choose

_log = logging.getLogger(__name__)
_LIBRARIES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


class Restored(NamedTuple):
    """A restored state, the step and metadata it was saved with, and in words the newer steps that were skipped."""

    state: Any
    step: int
    metadata: dict[str, Any]
    skipped: tuple[str, ...]


class CheckpointManager:
    """The checkpoints of one run: `directory/<step>/{arrays/, manifest.json}`.

    A step exists once its manifest does, which is written last; so a kill at any moment leaves all earlier steps as
    they were and the new one either whole or not counted. Every process of a run makes the same calls in the same
    order.

    Attributes:
      directory: where the steps lie; created if absent. Local paths, or any which orbax opens (gs://).
      keep: how many of the newest steps stay on disk; None keeps all. The best one stays besides.
      best_metric: name in `metadata['metrics']` by which `best_step` chooses; None means no best.
      best_mode: 'max' or 'min'.
      read_only: for looking at a run, also one in progress: takes no lock, cleans nothing, cannot save.
      timeout_seconds: bound on a background save, waiting for other processes included.

    Raises:
      UserError: for a bad choice, or a directory which another run is writing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        best_metric: str | None = None,
        best_mode: str = 'max',
        *,
        read_only: bool = False,
        timeout_seconds: int = 1200,
    ) -> None:
        choose('best_mode', best_mode, ('max', 'min'))
        if keep is not None and keep < 1:
            raise UserError(f'keep = {keep} checkpoints is too few; choose at least 1, or None for all')
        self._directory = steps.absolute(directory)
        self._keep = keep
        self._best_metric = best_metric
        self._best_mode = best_mode
        self._read_only = read_only
        self._writer = None if read_only else storage.Writer(timeout_seconds)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._saving: int | None = None
        self._written: set[int] = set()
        if not read_only:
            self._open()

    def _open(self) -> None:
        if processes.is_first():
            self._directory.mkdir(parents=True, exist_ok=True)
            lock.acquire(self._directory)
            for step in steps.unfinished(self._directory):
                _log.warning('removing checkpoint %d in %s: its save was not finished', step, self._directory)
                steps.remove(self._directory / str(step))
        processes.barrier('checkpoints_open')

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> bool:
        """Starts saving `state` as `step` and returns once its values are held on the host.

        Waits for the save before it. A step which this manager has written already is left alone (False is returned);
        one left by an earlier run is replaced. While newer steps of an earlier run lie there nothing is saved: the next
        start would take one of those.

        Args:
          step: number of updates that `state` has had.
          state: any pytree of arrays, typed random keys included.
          metadata: JSON values; `metadata['metrics'][best_metric]` decides which step is the best.

        Raises:
          UserError: for metadata which is not JSON, for a step below those which lie there, or if the save before this
            one failed (full disk, lost process).
        """
        if self._writer is None:
            raise UserError(f'the checkpoints in {self._directory} are open for reading only, or closed')
        self.wait()
        if step in self._written:
            _log.info('checkpoint %d is already saved', step)
            return False
        newer = [other for other in self.steps() if other > step and other not in self._written]
        if newer:
            raise UserError(
                f'checkpoint {step} would be older than {newer[-1]} in {self._directory}, which the next start would '
                f'take; to go on from an earlier step move {", ".join(map(str, newer))} away, or save elsewhere'
            )
        leaves = names.named_leaves(state)
        record = {
            'step': int(step),
            'metadata': manifest.to_json(metadata),
            'versions': _versions(),
            'arrays': names.describe(leaves),
        }
        folder = self._directory / str(int(step))
        self._saving = int(step)
        self._agree(self._attempt(self._make_room, folder))
        self._agree(self._attempt(self._writer.save, folder / manifest.ARRAYS, leaves))
        self._thread = threading.Thread(target=self._finish, args=(self._writer, folder, record), name='checkpoint')
        self._thread.start()
        return True

    def _make_room(self, folder: epath.Path) -> None:
        if processes.is_first():
            if folder.exists():
                _log.warning('checkpoint %s of an earlier run is replaced', folder.name)
                steps.remove(folder)
            folder.mkdir(parents=True)

    @staticmethod
    def _attempt(action: Callable[..., None], *arguments: Any) -> Exception | None:
        try:
            action(*arguments)
        except Exception as error:  # Held until every process knows of it.
            return error
        return None

    def _agree(self, error: Exception | None) -> None:
        """Raises on every process if the save failed on any, after removing what there is of it."""
        if processes.all_true(error is None):
            return
        if processes.is_first():
            self._attempt(steps.remove, self._directory / str(self._saving))
        reason = 'another process failed' if error is None else ' '.join(str(error).split())
        raise UserError(
            f'checkpoint {self._saving} could not be written to {self._directory}: {reason}; earlier ones are intact'
        ) from error

    def _finish(self, writer: storage.Writer, folder: epath.Path, record: dict[str, Any]) -> None:
        """Background: waits for the arrays, writes the manifest, then deletes what need not be kept."""

        def work() -> None:
            writer.wait()
            if processes.is_first():
                manifest.write(folder, **record)
                self._prune(record['step'])

        self._error = self._attempt(work)

    def _prune(self, just_saved: int) -> None:
        present = self.steps()
        if self._keep is None:
            return
        # The step just saved stays even when older runs left higher numbers.
        wanted = {just_saved, self.best_step(), *present[-self._keep :]}
        for step in present:
            if step not in wanted:
                steps.remove(self._directory / str(step))

    def wait(self) -> None:
        """Blocks until the save in progress is finished, or failed.

        Raises:
          UserError: saying why the save failed; earlier steps are untouched.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._agree(self._error)
        if self._saving is not None:
            self._written.add(self._saving)

    def close(self) -> None:
        """Waits for the save in progress and gives the directory free; call it before the program ends."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
                if processes.is_first():
                    lock.release(self._directory)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the finished steps, oldest first."""
        return steps.finished(self._directory)

    def latest_step(self) -> int | None:
        """Returns the newest finished step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best metric (the newer of equals; NaN never is), or None if no step has it."""
        if self._best_metric is None:
            return None
        sign = 1 if self._best_mode == 'max' else -1
        scores = []
        for step in self.steps():
            try:
                value = manifest.read(self._directory / str(step))['metadata'].get('metrics', {}).get(self._best_metric)
            except manifest.Damaged:
                continue
            if value is not None and not math.isnan(value):
                scores.append((sign * value, step))
        return max(scores)[1] if scores else None

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Returns the metadata of `step`, or of the newest step, without reading arrays.

        Raises:
          UserError: if there is no such step or its manifest is damaged.
        """
        return steps.read_manifest(self._directory, step)[1]['metadata']

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """Restores the newest intact step, or exactly `step`, straight into the shardings of `abstract_state`.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct; where `sharding` is None a numpy array comes back. The mesh of
            the saving run is never looked at, so any number of devices will do.
          step: a finished step; None takes the newest whose checksums all hold. The damaged ones before it are set
            aside under the name `<step>.damaged`, unless read-only.

        Raises:
          UserError: if there is no intact checkpoint, `step` is damaged, or anything is missing, unexpected, misshaped
            or of another dtype; every difference is listed.
        """
        self.wait()
        wanted_leaves = names.named_leaves(abstract_state)
        if step is not None:
            steps.locate(self._directory, step)
        candidates = processes.same_everywhere([step] if step is not None else self.steps()[::-1])
        skipped: dict[int, str] = {}
        for candidate in candidates:
            record = self._read_intact(candidate, skipped)
            if record is None:
                continue
            found = names.differences(record['arrays'], names.describe(wanted_leaves))
            if found:
                raise UserError(f'checkpoint {candidate} in {self._directory} does not fit: {"; ".join(found)}')
            self._set_aside(skipped)
            arrays = storage.read(self._directory / str(candidate) / manifest.ARRAYS, wanted_leaves)
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted_leaves])
            return Restored(state, candidate, record['metadata'], tuple(skipped.values()))
        reasons = f': {"; ".join(skipped.values())}' if skipped else ''
        raise UserError(f'no intact checkpoint in {self._directory}{reasons}')

    def _set_aside(self, damaged: Iterable[int]) -> None:
        # Only once an intact step is found: with none, each start must refuse, not the first alone.
        if not self._read_only and processes.is_first():
            for step in damaged:
                steps.set_aside(self._directory / str(step))

    def _read_intact(self, step: int, skipped: dict[int, str]) -> dict[str, Any] | None:
        """Returns the manifest of a step whose files are all as written, or None, adding the reason to `skipped`."""
        folder = self._directory / str(step)
        record, reason = None, 'another process found it damaged'
        try:
            record = manifest.read(folder)
            manifest.verify(folder, record['files'], jax.process_index(), jax.process_count())
        except manifest.Damaged as damage:
            record, reason = None, str(damage)
        if processes.all_true(record is not None):
            return record
        skipped[step] = f'checkpoint {step} is damaged ({reason})'
        _log.warning('skipping %s in %s', skipped[step], self._directory)
        return None


def _versions() -> dict[str, str]:
    found = {'python': platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
