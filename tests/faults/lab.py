"""An undisturbed run, and what every fault has to leave: the newest intact step, its reasons, the same bits."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import sitting
from tests.faults.runs import Live, Outcome, inspect, newest_intact


@dataclasses.dataclass
class Record:
    """What one fault did.

    Attributes:
      fault, detail: which, and when or where.
      wanted: the newest intact step before the restart; 'refusal' where the run must not go on.
      resumed: the step at which the next sitting began, or the line with which it refused.
      wrong: what was not as it should be; empty if nothing was lost.
    """

    fault: str
    detail: str
    wanted: int | str = ''
    resumed: int | str = ''
    wrong: list[str] = dataclasses.field(default_factory=list)


class Lab:
    """A folder for runs of one experiment and the outcome which all of them must have.

    Attributes:
      reference: outcome of the run which nobody disturbed.
      durations: mean seconds of its phases.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self.folder, self.say = folder, say
        self._texts, self._programs, self._count = folder / 'texts.txt', folder / 'programs', 0
        sitting.import_once()
        sitting.write_texts(folder)
        self.start(folder / 'warm up').wait()  # Fills the cache of programs.
        live = self.start(folder / 'undisturbed')
        live.wait()
        if live.over[0] != 'finished':
            raise RuntimeError(f'the undisturbed run: {live.over}')
        self.durations, self.reference = live.durations(), Outcome.read(folder / 'undisturbed')
        same = self.reference.differences(Outcome.read(folder / 'warm up'))
        if same:
            raise RuntimeError(f'two undisturbed runs differ in {same}')
        self._half = folder / 'half'
        live = self.start(self._half)
        live.until('finalise', 6)  # Each save tells two: its manifest, then the removal of old steps.
        live.kill()
        shutil.rmtree(self._half / 'checkpoints' / '8', ignore_errors=True)

    def start(self, directory: Path, **options: Any) -> Live:
        """Starts a sitting in `directory`."""
        return Live(directory, self._texts, self._programs, **options)

    def new(self) -> Path:
        """Returns the path of a run which has not begun."""
        self._count += 1
        return self.folder / f'run {self._count}'

    def half(self) -> Path:
        """Returns a run killed after its third save, with checkpoints 2, 4 and 6."""
        directory = self.new()
        shutil.copytree(self._half, directory)
        return directory

    def finish(self, record: Record, directory: Path, same_log: bool = True, **options: Any) -> Live:
        """Runs the next sitting to its end and judges it: begun at the right step, reasons said, same bits.

        Without `same_log` the log of numbers need not be the undisturbed one.
        """
        before, record.wanted = inspect(directory), newest_intact(directory)
        live = self.start(directory, **options)
        live.wait()
        self.check_start(record, live, before)
        self.check_end(record, live, directory, same_log)
        return live

    def check_start(self, record: Record, live: Live, before: dict[int, str]) -> None:
        """Compares where a sitting began, and what it said of steps it did not use, with what lay on the disk."""
        wanted = max((step for step, state in before.items() if state == 'intact'), default=0)
        if live.resumed_at is None and live.over[0] == 'killed':
            return
        record.resumed = live.over[1] if live.resumed_at is None else live.resumed_at
        if live.resumed_at != wanted:
            record.wrong.append(f'began at {live.resumed_at} instead of {wanted} ({live.over})')
        for step, state in before.items():
            said = {'unfinished': f'removing checkpoint {step} in ', 'damaged': f'checkpoint {step} is damaged ('}
            if state in said and (step > wanted or state == 'unfinished') and said[state] not in live.log:
                record.wrong.append(f'did not say that it skipped checkpoint {step}')

    def check_end(self, record: Record, live: Live, directory: Path, same_log: bool = True) -> None:
        """Compares a finished run with the undisturbed one."""
        if live.over[0] != 'finished':
            record.wrong.append(f'{live.over[0]}: {live.over[1]}')
        else:
            different = self.reference.differences(Outcome.read(directory))
            record.wrong += [f'{name} differ' for name in different if same_log or name != 'log']
        if not record.wrong:
            shutil.rmtree(directory)

    def refused(self, record: Record, live: Live, *phrases: str) -> None:
        """Checks that a sitting ended with one clear line which holds these phrases."""
        how, message = live.over
        record.wanted, record.resumed = 'refusal', message
        if how != 'refused' or '\n' in message or not all(phrase in message for phrase in phrases):
            record.wrong.append(f'{how} instead of one line with {phrases}: {message}')
