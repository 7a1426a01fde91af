"""Trains and compares the arms of a sweep: python -m experiments.ablate --sweep=heads [--workdir=DIR].

The same command goes on after an interruption. --dry_run shows what would run, --report makes the tables anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the project's directory, not experiments/, belongs on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import dataclasses
import importlib

from absl import flags

from experiments import common
from experiments.screen import Screen
from experiments.sweep_screen import SweepScreen, run_table
from transformer_jax.errors import UserError, choose
from transformer_jax.sweeps import Sweep, plan
from transformer_jax.sweeps.cost import costs, fairness
from transformer_jax.sweeps.pace import seconds_per_flop
from transformer_jax.sweeps.plan import check_workdir, choose_runs, describe, write_sweep
from transformer_jax.sweeps.report import publish, write_report
from transformer_jax.sweeps.runner import ENDED, run_all, share_programs, status

SWEEPS = Path(__file__).parent / 'sweeps'
CONFIG = str(Path(__file__).parent / 'configs' / 'ablation.py')

flags.DEFINE_string('sweep', None, 'name of a file in experiments/sweeps')
flags.DEFINE_string('workdir', None, 'directory of the sweep (default: runs/<name of the sweep>)')
flags.DEFINE_list('seeds', None, 'seeds, such as 0,1,2 (default: those of the sweep); more can be added later')
flags.DEFINE_integer('index', None, 'only the run of this number, for job arrays')
flags.DEFINE_string('shard', None, 'only every n-th run from the i-th on: i/n, counted from 0')
flags.DEFINE_bool('retry', False, 'try failed and diverged runs again')
flags.DEFINE_bool('dry_run', False, 'show the runs, their parameters, FLOPs and expected time')
flags.DEFINE_bool('report', False, 'only make tables and figures of the runs which have ended')
flags.DEFINE_string('docs', None, 'directory of pages into which the report is copied, its ablations.md renewed')
flags.DEFINE_string('machine', None, 'with --docs: what the runs were made on, in words')


def main() -> int:
    """Plans the sweep, runs what has not ended, and reports."""
    options, screen = flags.FLAGS, Screen()
    sweep = _sweep(options.sweep, options.seeds)
    workdir = Path(options.workdir or f'runs/{sweep.name}')
    if options.docs and not options.machine:
        raise UserError('--docs needs --machine, what the runs were made on, such as --machine="8 TPU v5e"')
    if options.report:
        _report(workdir, screen)
        return 0
    common.show_logs(lambda text: None)
    base = common.experiment()
    runs = plan(sweep, base, workdir)
    chosen = choose_runs(runs, options.index, options.shard)
    description = describe(sweep, base)
    check_workdir(workdir, description, runs)
    experiments = {run.variant: run.experiment for run in runs if run.seed == sweep.seeds[0]}
    cost = costs(experiments)
    fair = fairness(cost, experiments, sweep.baseline)
    if options.dry_run:
        pace, origin = seconds_per_flop(runs, cost)
        screen.message('\n'.join([run_table(chosen, cost, pace), f'Expected time: {origin}.', *fair]))
        return 0
    write_sweep(workdir, description, cost, fair)
    share_programs(workdir)
    live = SweepScreen(chosen, cost)
    common.show_logs(live.message)
    if not run_all(chosen, options.retry, live.watch):
        return 0
    left = [run for run in runs if status(run.directory) not in ENDED]
    if left:
        screen.message(
            f'{len(left)} of {len(runs)} runs of the sweep are left to others; --report when they have ended'
        )
        return 0
    _report(workdir, screen)
    return 0


def _report(workdir: Path, screen: Screen) -> None:
    screen.message(write_report(workdir))
    if flags.FLAGS.docs:
        publish(workdir, Path(flags.FLAGS.docs), flags.FLAGS.machine)


def _sweep(name: str | None, seeds: list[str] | None) -> Sweep:
    found = sorted(path.stem for path in SWEEPS.glob('[a-z]*.py'))
    if name is None:
        raise UserError(f'--sweep is missing; choose from {", ".join(found)}')
    sweep = importlib.import_module(f'experiments.sweeps.{choose("--sweep", name, found)}').get_sweep()
    for point in sweep.points:
        for path in common.overridden:
            if path in point.overrides:
                raise UserError(f"--config.{path} would be overridden by sweep '{name}'; leave it out")
    if seeds is None:
        return sweep
    try:
        return dataclasses.replace(sweep, seeds=tuple(map(int, seeds)))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--seeds = '{','.join(seeds)}' must be whole numbers, such as 0,1,2") from error


if __name__ == '__main__':
    common.run(main, lambda: common.define_config(CONFIG))
