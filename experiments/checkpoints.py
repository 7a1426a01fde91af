"""Lists checkpoints without loading them: python -m experiments.checkpoints --workdir=DIR [--step=N] [--verify].

With --step, names, shapes, dtypes and bytes of the arrays of one step. Exit status 1 if a listed step is damaged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

if not __package__:  # run as a file: the project's directory, not experiments/, belongs on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from absl import flags

from experiments import common
from transformer_jax.checkpoints import StepSummary, list_arrays, list_steps, read_metadata

flags.DEFINE_string('workdir', None, 'run directory, its checkpoints folder, or the folder of one step')
flags.DEFINE_integer('step', None, 'list the arrays of this step (default: list the steps)')
flags.DEFINE_bool('verify', False, 'compare every file with its checksum, not only with its size')


def main() -> int:
    """Prints a table of steps, or of the arrays of one."""
    options = flags.FLAGS
    common.need_workdir()
    summaries = list_steps(options.workdir, options.step, verify=options.verify)
    _print_table(('step', 'saved (UTC)', 'bytes', 'state', 'metrics'), map(_row, summaries), right=(0, 2))
    if options.step is not None and any(summary.bytes is not None for summary in summaries):
        _print_arrays(options.workdir, options.step)
    return int(any(summary.state == 'damaged' for summary in summaries))


def _row(summary: StepSummary) -> tuple[str, ...]:
    saved = '' if summary.saved_at is None else time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(summary.saved_at))
    return (
        str(summary.step),
        saved,
        '' if summary.bytes is None else f'{summary.bytes:,}',
        f'{summary.state}: {summary.reason}' if summary.reason else summary.state,
        ', '.join(f'{name} {value:.5g}' for name, value in summary.metrics.items()),
    )


def _print_arrays(workdir: str, step: int) -> None:
    arrays, metadata = list_arrays(workdir, step), read_metadata(workdir, step)
    print('\nwritten by', ', '.join(f'{name} {version}' for name, version in metadata['versions'].items()), end='\n\n')
    rows = [(name, '×'.join(map(str, info.shape)), info.dtype, f'{info.bytes:,}') for name, info in arrays.items()]
    rows.append((f'{len(arrays)} arrays', '', '', f'{sum(info.bytes for info in arrays.values()):,}'))
    _print_table(('array', 'shape', 'dtype', 'bytes'), rows, right=(3,))


def _print_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], right: tuple[int, ...]) -> None:
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        cells = [cell.rjust(width) if column in right else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        print('  '.join(cells).rstrip())


if __name__ == '__main__':
    common.run(main)
