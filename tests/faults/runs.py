"""Starts and ends sittings, and judges by its own reading of the disk what became of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import select
import signal
import time
import warnings
from pathlib import Path
from typing import Any

from tests.faults import sitting

# Looks are counted and not the clock, for a machine which is paused pauses the run and its watcher alike.
_LOOK, _LOOKS = 0.2, 10_000
_VOLATILE = re.compile(r'seconds|tokens_per|flops_per')


class Live:
    """A sitting which goes on in a process of its own."""

    def __init__(self, directory: Path, texts: Path, programs: Path, **options: Any):
        self.lines: list[list[Any]] = []
        self._pipe, theirs = os.pipe()
        self._rest = b''
        target = dict(pipe=theirs, directory=directory, texts=texts, programs=programs, **options)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # jax warns of forks; none of its threads has begun here.
            self.process = multiprocessing.get_context('fork').Process(target=sitting.sit, kwargs=target)
            self.process.start()
        os.close(theirs)

    def _read(self, seconds: float) -> bool:
        """Takes in what was told within `seconds`; False once the process can tell nothing more."""
        if not select.select([self._pipe], [], [], seconds)[0]:
            return True
        piece = os.read(self._pipe, 1 << 16)
        *whole, self._rest = (self._rest + piece).split(b'\n')
        self.lines += [json.loads(line) for line in whole]
        return bool(piece)

    def until(self, phase: str, count: int) -> bool:
        """Waits for the `count`-th time that `phase` begins; False if the sitting ended before."""
        for _ in range(_LOOKS):
            if sum(line[:2] == ['begin', phase] for line in self.lines) >= count:
                return True
            if not self._read(_LOOK):
                return False
        raise TimeoutError(f'no {phase} number {count}, and no end')

    def watch(self, seconds: float) -> None:
        """Takes in what is told during `seconds`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self._read(left):
            pass

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kills it at once, as `kill -9` does, and takes in what it had told."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, looks: int = _LOOKS) -> None:
        """Waits for its end; after `looks` looks of a fifth of a second it is killed."""
        while self._read(_LOOK):
            looks -= 1
            if looks == 0:
                self.signal(signal.SIGKILL)
        self.process.join()
        os.close(self._pipe)

    @property
    def over(self) -> tuple[str, str]:
        """(how it ended, message): finished, interrupted, refused, crashed or killed."""
        last = self.lines[-1] if self.lines else ['']
        return (last[1], last[2]) if last[0] == 'over' else ('killed', '')

    @property
    def phase(self) -> str:
        """The innermost phase which had begun and not ended when it told its last line; 'between' if none."""
        begun: list[str] = []
        for kind, phase, *_ in self.lines:
            if kind == 'begin':
                begun.append(phase)
            elif kind == 'end':
                begun.remove(phase)
        return begun[-1] if begun else 'between'

    @property
    def log(self) -> str:
        """Its log lines."""
        return '\n'.join(line[2] for line in self.lines if line[0] == 'log')

    @property
    def resumed_at(self) -> int | None:
        """The step it went on from; 0 if it began anew, None if it never came to that."""
        found = re.search(r'going on from the checkpoint of step (\d+)', self.log)
        if found:
            return int(found[1])
        return 0 if any(line[:2] == ['begin', 'step'] for line in self.lines) else None

    def durations(self) -> dict[str, float]:
        """Mean seconds of each phase."""
        total: dict[str, list[float]] = {}
        begun: dict[str, float] = {}
        for kind, phase, moment in (line for line in self.lines if line[0] in ('begin', 'end')):
            if kind == 'begin':
                begun[phase] = moment
            else:
                total.setdefault(phase, []).append(moment - begun[phase])
        return {phase: sum(seconds) / len(seconds) for phase, seconds in total.items()}


def inspect(directory: Path) -> dict[int, str]:
    """Returns {step: 'intact', 'damaged' or 'unfinished'} by the files alone; nothing of the library is used."""
    checkpoints = directory / 'checkpoints'
    folders = [child for child in checkpoints.iterdir() if child.name.isdecimal()] if checkpoints.is_dir() else []
    return {int(folder.name): _inspect_step(folder) for folder in folders}


def _inspect_step(folder: Path) -> str:
    if not (folder / 'manifest.json').exists():
        return 'unfinished'
    try:
        record = json.loads((folder / 'manifest.json').read_text())
        digest = record.pop('sha256')
        own = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        files = {name: (folder / name).read_bytes() for name in record['files']}
        found = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}
        return 'intact' if digest == own and found == record['files'] else 'damaged'
    except (OSError, ValueError, KeyError, TypeError):
        return 'damaged'


def newest_intact(directory: Path) -> int:
    """Returns the newest intact step, 0 if there is none."""
    return max((step for step, state in inspect(directory).items() if state == 'intact'), default=0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run leaves which must not depend on what happened to it."""

    arrays: dict[str, str]
    averaged: dict[str, str]
    result: dict[str, Any]
    log: list[dict[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Outcome:
        """Reads it from a run directory: SHA-256 of each array of the last step and of the average, results, log."""
        lines = [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]
        return cls(
            _hashes(directory / 'checkpoints' / str(sitting.STEPS) / 'arrays'),
            _hashes(directory / 'averaged' / str(sitting.STEPS) / 'arrays'),
            _steady(json.loads((directory / 'result.json').read_text())),
            [_steady(line) for line in lines],
        )

    def differences(self, other: Outcome) -> list[str]:
        """Returns the names of the parts which are not the same."""
        names = [field.name for field in dataclasses.fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def _hashes(folder: Path) -> dict[str, str]:
    """{file: SHA-256} of the zarr folders, orbax's own notes (times of writing among them) left out."""
    files = sorted(path for path in folder.rglob('*') if path.is_file() and path.parent != folder)
    assert files, f'no arrays in {folder}'
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _steady(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not _VOLATILE.search(name)}
