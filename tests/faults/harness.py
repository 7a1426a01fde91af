"""Kills and damages real runs and counts what is lost: python -m tests.faults.harness [--kills=50] [--output=FILE].

Every run must go on from its newest intact step, say what it skipped and why, and end with the bits of a run which
nobody disturbed; or refuse in one clear line. Exit status 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tests.faults import incidents, sitting
from tests.faults.lab import Lab, Record


def short(lab: Lab, random: Random) -> Iterator[Callable[[], Record]]:
    """Each other fault once."""
    for name in list(incidents.DAMAGES)[:2]:
        yield lambda name=name: incidents.damage(lab, name)
    yield lambda: incidents.terminate(lab, random.choice(sitting.PHASES[1:]), random.random())
    yield lambda: incidents.large_file(lab)
    yield lambda: incidents.second_run(lab, 'step', seed=0)
    yield lambda: incidents.clock_back(lab)


def long(lab: Lab, random: Random) -> Iterator[Callable[[], Record]]:
    """Each other fault in every way."""
    for name in incidents.DAMAGES:
        yield lambda name=name: incidents.damage(lab, name)
    yield lambda: incidents.damage_all(lab)
    for name in incidents.OTHER_FILES:
        yield lambda name=name: incidents.damage_other(lab, name)
    for phase in sitting.PHASES:
        yield lambda phase=phase: incidents.terminate(lab, phase, random.random())
    yield lambda: incidents.large_file(lab)
    for phase, number in (
        ('compile', 1),
        ('step', 2),
        ('save', 3),
        ('finalise', 1),
        ('evaluation', 2),
        ('evaluation', 5),
    ):
        yield lambda phase=phase, number=number: incidents.full_disk(lab, phase, number)
    for phase, seed in (('compile', 0), ('step', 1), ('save', 0), ('evaluation', 0)):
        yield lambda phase=phase, seed=seed: incidents.second_run(lab, phase, seed)
    yield lambda: incidents.two_at_once(lab)
    yield lambda: incidents.clock_back(lab)


HEADING = '## The faults, counted'
OTHERS = {'long': long, 'short': short, 'none': lambda lab, random: iter(())}


def table(records: list[Record]) -> str:
    """Returns the records as a Markdown table: one line for all kills of a phase, one for each other fault."""
    groups = collections.defaultdict(list)
    for record in records:
        groups[record.fault, record.detail].append(record)
    lines = ['| fault | where or when | times | went on from | lost |', '|---|---|---|---|---|']
    for (fault, detail), group in sorted(groups.items(), key=lambda item: (item[0][0] != 'kill -9', 0)):
        begun = sorted({record.resumed for record in group if isinstance(record.resumed, int)})
        steps = 'step ' + ', '.join(map(str, begun)) if begun else ''
        refusals = 'refused, then as if nothing had been' if group[0].wanted == 'refusal' else ''
        lines.append(
            f'| {fault} | {detail} | {len(group)} | {steps or refusals or group[0].resumed} '
            f'| {sum(bool(record.wrong) for record in group)} |'
        )
    lost = sum(bool(record.wrong) for record in records)
    lines.append(f'| all | | {len(records)} | | {lost} |')
    return '\n'.join(lines)


def publish(page: Path, records: list[Record], command: str) -> None:
    """Puts the table, and the command which made it, in place of what stands below the page's last heading."""
    kept = page.read_text().split(HEADING)[0]
    page.write_text(f'{kept}{HEADING}\n\n```bash\n{command}\n```\n\n{table(records)}\n')


def main() -> int:
    """Runs the faults, prints the table and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--kills', type=int, default=50, help='how often to kill -9')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--others', choices=('long', 'short', 'none'), default='long', help='other faults than kills')
    parser.add_argument('--output', type=Path, help='file for the records, as JSON')
    parser.add_argument('--table', type=Path, nargs='+', help='only print the table of these records')
    parser.add_argument('--docs', type=Path, help='page whose table is written anew, docs/faults.md')
    parser.add_argument('--keep', type=Path, help='folder for the runs; those which lost something stay there')
    options = parser.parse_args()
    if options.table:
        print(table([Record(**fields) for path in options.table for fields in json.loads(path.read_text())]))
        return 0
    begin, random = time.monotonic(), Random(options.seed)

    def say(text: str) -> None:
        print(f'{time.monotonic() - begin:6.0f} s  {text}', flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        lab = Lab(folder.resolve(), say)
        say('undisturbed run: ' + ', '.join(f'{name} {seconds:.2f} s' for name, seconds in lab.durations.items()))
        records: list[Record] = []

        def keep(new: list[Record]) -> None:
            records.extend(new)
            if options.output:
                options.output.write_text(
                    json.dumps([dataclasses.asdict(record) for record in records], indent=1) + '\n'
                )

        keep(incidents.kills(lab, options.kills, random))
        for case in OTHERS[options.others](lab, random):
            record = case()
            keep([record])
            say(f'{record.fault}, {record.detail}: {record.resumed}')
        for record in records:
            for wrong in record.wrong:
                say(f'LOST {record.fault}, {record.detail}: {wrong}')
    print(table(records))
    if options.docs:
        publish(options.docs, records, f'python -m tests.faults.harness {" ".join(sys.argv[1:])}')
    return int(any(record.wrong for record in records))


if __name__ == '__main__':
    raise SystemExit(main())
