"""The faults: kills, signals, damaged files, full disks, second runs, a clock which goes backwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.faults import sitting
from tests.faults.lab import Lab, Record
from tests.faults.runs import inspect, newest_intact

GRACE_LOOKS = 300  # of a fifth of a second: a minute
_MOST_KILLS_OF_A_RUN = 8


def kills(lab: Lab, count: int, random: Random) -> list[Record]:
    """Kills runs `count` times by SIGKILL, at random moments of each phase in turn; each run ends undisturbed.

    Kills of `compile` happen with an empty cache, so that something is compiled.
    """
    records: list[Record] = []
    directory, own, unsettled = lab.new(), 0, []
    while own or len(records) < count:
        phase = sitting.PHASES[len(records) % len(sitting.PHASES)]
        disturb = len(records) < count and own < _MOST_KILLS_OF_A_RUN
        before = inspect(directory)
        live = lab.start(directory, cold=disturb and phase == 'compile')
        often = 2 if phase in ('compile', 'evaluation') else 6
        if disturb and live.until(phase, random.randint(1, often)):
            live.watch(random.random() * lab.durations[phase])
            live.kill()
        else:
            live.wait()
        for record in unsettled:
            lab.check_start(record, live, before)
        if live.over[0] == 'killed':
            # A sitting killed before it had begun leaves the kill before it to be judged by the next one.
            unsettled = [record for record in unsettled if record.resumed == '']
            unsettled.append(Record('kill -9', f'in {live.phase}', newest_intact(directory)))
            records.append(unsettled[-1])
            own += 1
            lab.say(f'kill {len(records)} {records[-1].detail}, newest intact checkpoint {records[-1].wanted}')
        else:
            if own:
                lab.check_end(records[-1], live, directory)
            directory, own, unsettled = lab.new(), 0, []
    return records


def terminate(lab: Lab, phase: str, share: float) -> Record:
    """Sends SIGTERM in a phase: the sitting must end by itself in time, having saved what it had done."""
    directory = lab.new()
    record = Record('SIGTERM', f'in {phase}')
    live = lab.start(directory)
    live.until(phase, 2)
    live.watch(share * lab.durations[phase])
    live.signal(signal.SIGTERM)
    live.wait(GRACE_LOOKS)
    how, step = live.over
    if how == 'interrupted' and newest_intact(directory) != int(step):
        record.wrong.append(f'stopped at {step}, but the newest intact checkpoint is {newest_intact(directory)}')
    if how not in ('interrupted', 'killed') or (how == 'killed' and live.process.exitcode != -signal.SIGTERM):
        record.wrong.append(f'{how} {step}, exit status {live.process.exitcode}')
    lab.finish(record, directory)
    return record


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Cuts a file in half."""
    os.truncate(path, path.stat().st_size // 2)


def make_unreadable(path: Path) -> None:
    """Makes opening a file fail, for root too, whom permissions do not stop."""
    path.unlink()
    path.mkdir()


_EMBEDDING = 'arrays/params.embedding.embedding/0.0'
# What is done to which file of which step; the run has checkpoints 2, 4 and 6.
DAMAGES: dict[str, dict[int, tuple[str, Callable[[Path], None]]]] = {
    'flipped byte in the newest, truncated array in the next': {6: (_EMBEDDING, flip), 4: (_EMBEDDING, truncate)},
    'missing array in the newest, unreadable array in the next': {
        6: (_EMBEDDING, Path.unlink), 4: (_EMBEDDING, make_unreadable),
    },
    'flipped byte in an array': {6: (_EMBEDDING, flip)},
    'truncated array': {6: (_EMBEDDING, truncate)},
    'missing array': {6: (_EMBEDDING, Path.unlink)},
    'unreadable array': {6: (_EMBEDDING, make_unreadable)},
    'flipped byte in the description of an array': {6: ('arrays/params.embedding.embedding/.zarray', flip)},
    'missing description of an array': {6: ('arrays/params.embedding.embedding/.zarray', Path.unlink)},
    'truncated list of arrays': {6: ('arrays/_METADATA', truncate)},
    'flipped byte in the manifest': {6: ('manifest.json', flip)},
    'truncated manifest': {6: ('manifest.json', truncate)},
    'missing manifest': {6: ('manifest.json', Path.unlink)},
    'unreadable manifest': {6: ('manifest.json', make_unreadable)},
    'missing folder of arrays': {6: ('arrays', shutil.rmtree)},
}  # fmt: skip


def damage(lab: Lab, name: str) -> Record:
    """Damages files of checkpoints: the run must go on from the newest which is intact and say why."""
    directory, record = lab.half(), Record('damaged checkpoint', name)
    for step, (file, harm) in DAMAGES[name].items():
        harm(directory / 'checkpoints' / str(step) / file)
    lab.finish(record, directory)
    return record


def damage_all(lab: Lab) -> Record:
    """With no intact checkpoint left each start refuses; with the files put back the run goes on."""
    directory, record = lab.half(), Record('damaged checkpoint', 'a flipped byte in every checkpoint')
    files = [directory / 'checkpoints' / str(step) / _EMBEDDING for step in (2, 4, 6)]
    for file in files:
        flip(file)
    for _ in range(2):  # The second start must not find an empty directory and begin anew.
        live = lab.start(directory)
        live.wait()
        lab.refused(record, live, 'no intact checkpoint in ', *(f'checkpoint {step} is damaged' for step in (2, 4, 6)))
    for file in files:
        flip(file)
    return _go_on_after_refusal(lab, record, directory)


# What is done to other files of the run: file, harm, and words of the refusal (none: the run goes on).
OTHER_FILES: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    'log of numbers cut short': ('metrics.jsonl', truncate, ()),
    'flipped byte in the log of numbers': ('metrics.jsonl', flip, ()),
    'missing log of numbers': ('metrics.jsonl', Path.unlink, ()),
    'missing config.json': ('config.json', Path.unlink, ()),
    'truncated config.json': ('config.json', truncate, ('config.json', 'is no JSON')),
    'truncated model.json': ('model.json', truncate, ()),
    'flipped byte in the vocabulary': ('tokenizer.model', flip, ('tokenizer.model',)),
    'missing vocabulary': ('tokenizer.model', Path.unlink, ()),
}


def damage_other(lab: Lab, name: str) -> Record:
    """Damages a file beside the checkpoints; what is refused must go on once the file is put back."""
    file, harm, phrases = OTHER_FILES[name]
    directory, record = lab.half(), Record('damaged file of the run', name)
    original = (directory / file).read_bytes()
    harm(directory / file)
    if phrases:
        live = lab.start(directory)
        live.wait()
        lab.refused(record, live, *phrases)
        (directory / file).write_bytes(original)
        return _go_on_after_refusal(lab, record, directory)
    lab.finish(record, directory, same_log=file != 'metrics.jsonl')
    return record


def large_file(lab: Lab) -> Record:
    """From the second save on no file may grow: the save is reported and the run goes on once it may."""
    directory, record = lab.new(), Record('full disk', 'no file may grow (RLIMIT_FSIZE) from the second save on')
    live = lab.start(directory, largest_file=6000)
    live.wait()
    lab.refused(record, live, 'checkpoint 4 could not be written to ', 'earlier ones are intact')
    return _go_on_after_refusal(lab, record, directory)


def full_disk(lab: Lab, phase: str, number: int) -> Record:
    """A file system without a free byte from a moment on: one clear line, and the run goes on once there is room.

    Needs the right to mount a tmpfs: root, or `unshare --user --map-root-user --mount`.
    """
    directory, record = lab.new(), Record('full disk', f'a tmpfs filled up in {phase} {number}')
    directory.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=16m', 'tmpfs', str(directory)], capture_output=True)
    if mounted.returncode:
        record.resumed = 'not tried: no right to mount a file system'
        return record
    try:
        live = lab.start(directory / 'run')
        live.until(phase, number)
        live.signal(signal.SIGSTOP)
        _fill(directory / 'ballast')
        live.signal(signal.SIGCONT)
        live.wait()
        lab.refused(record, live, str(directory))
        (directory / 'ballast').unlink()
        return _go_on_after_refusal(lab, record, directory / 'run')
    finally:
        subprocess.run(['umount', str(directory)], check=True)


def _fill(path: Path) -> None:
    with open(path, 'wb', buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def _go_on_after_refusal(lab: Lab, record: Record, directory: Path) -> Record:
    refusal = record.resumed
    lab.finish(record, directory)
    record.wanted, record.resumed = 'refusal', refusal
    return record


def second_run(lab: Lab, phase: str, seed: int) -> Record:
    """A second run begins in the directory of one which is at work: it is refused and the first notices nothing."""
    directory = lab.new()
    record = Record('two runs in one directory', f'{"another seed" if seed else "the same"}, the first is in {phase}')
    first = lab.start(directory)
    first.until(phase, 1)
    first.signal(signal.SIGSTOP)
    second = lab.start(directory, seed=seed)
    second.wait()
    first.signal(signal.SIGCONT)
    first.wait()
    words = 'config.training.seed: 0 -> 1' if seed else f'is being written by another run (process {first.process.pid} '
    lab.refused(record, second, str(directory), words)
    lab.check_end(record, first, directory)
    return record


def two_at_once(lab: Lab) -> Record:
    """Two runs begin in one new directory at the same moment: one is refused, the other is as if it were alone."""
    directory, record = lab.new(), Record('two runs in one directory', 'both at once')
    lives = [lab.start(directory) for _ in range(2)]
    for live in lives:
        live.wait()
    refused, finished = sorted(lives, key=lambda live: live.over[0] == 'finished')
    lab.refused(record, refused, 'is being written by another run')
    lab.check_end(record, finished, directory)
    return record


def clock_back(lab: Lab) -> Record:
    """The clock stands years before the checkpoints and runs backwards; the newest file is the oldest by its date."""
    directory, record = lab.half(), Record('clock going backwards', 'before the saved steps, whose dates are reversed')
    for step in (2, 4, 6):
        for path in (directory / 'checkpoints' / str(step)).rglob('*'):
            os.utime(path, (1.5e9 - step, 1.5e9 - step))
    lab.finish(record, directory, clock_back=True)
    return record
