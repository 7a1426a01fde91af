"""What a sweep consists of: its runs, each with its experiment and its directory, checked before any of them starts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError, choose
from transformer_jax.sweeps.cost import Cost
from transformer_jax.sweeps.language import Points, overlay
from transformer_jax.training.config import Experiment, differences, to_plain
from transformer_jax.training.run_directory import CONFIG_FILE, RunDirectory

SWEEP_FILE = 'sweep.json'
LEAST_SEEDS = 2


@dataclasses.dataclass(frozen=True)
class Sweep:
    """An ablation: the arms which are compared, and with which of them.

    Attributes:
      name: of the sweep; title: what it asks, as a heading.
      points: the arms.
      baseline: the name of the arm with which the others are compared.
      seeds: each arm is trained once with each of them.
      heat_map: two paths whose values are the rows and columns of a map of results, for a product of two axes.
    """

    name: str
    title: str
    points: Points
    baseline: str
    seeds: tuple[int, ...] = (0, 1, 2)
    heat_map: tuple[str, str] | None = None

    def __post_init__(self):
        object.__setattr__(self, 'seeds', tuple(self.seeds))
        names = [point.name for point in self.points]
        if not names:
            raise UserError(f"sweep '{self.name}' has no runs; give it points")
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"sweep '{self.name}' has variant '{name}' {names.count(name)} times; names are unique")
        choose(f"baseline of sweep '{self.name}'", self.baseline, names)
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError(f'seeds = {self.seeds} has a seed twice')
        if len(self.seeds) < LEAST_SEEDS:
            raise UserError(
                f'seeds = {self.seeds}: an interval needs at least {LEAST_SEEDS} seeds, such as --seeds=0,1,2'
            )
        for path in self.heat_map or ():
            for point in self.points:
                choose(f"path of the heat map of variant '{point.name}'", path, point.overrides)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: arm `variant` with one seed, in its own run directory."""

    index: int
    variant: str
    seed: int
    experiment: Experiment
    directory: Path


def plan(sweep: Sweep, base: Experiment, workdir: Path) -> list[PlannedRun]:
    """Returns the runs, seeds varying slowest so that early results already compare all arms.

    Raises:
      UserError: for an override which does not fit, or two arms of one config or directory.
    """
    experiments: dict[str, Experiment] = {}
    for point in sweep.points:
        for path, instead in (('training.seed', 'give the sweep seeds'), ('name', "it is the sweep's")):
            if path in point.overrides:
                raise UserError(f"variant '{point.name}' overrides {path}; leave it out, {instead}")
        experiments[point.name] = dataclasses.replace(
            overlay(base, point.overrides), name=f'{sweep.name}: {point.name}'
        )
        if experiments[point.name].data.spec('valid') is None:
            raise UserError("a sweep is judged on validation data, but data.valid = 'none'; name some")
    _check_distinct(experiments)
    return [
        PlannedRun(
            index, point.name, seed, overlay(experiments[point.name], {'training.seed': seed}),
            Path(workdir).absolute() / folder(point.name) / f'seed={seed}',
        )
        for index, (seed, point) in enumerate((seed, point) for seed in sweep.seeds for point in sweep.points)
    ]  # fmt: skip


def folder(variant: str) -> str:
    """Returns the name of an arm's directory."""
    return re.sub(r'[^\w=.+-]+', '_', variant)


def _check_distinct(experiments: dict[str, Experiment]) -> None:
    seen: dict[Any, str] = {}
    for name, experiment in experiments.items():
        config = json.dumps({**experiment.to_dict(), 'name': ''}, sort_keys=True)
        for key, what in ((config, 'have the same config'), (folder(name), 'would share a directory')):
            if key in seen:
                raise UserError(f"variants '{seen[key]}' and '{name}' {what}; leave one out or rename it")
            seen[key] = name


def choose_runs(runs: Sequence[PlannedRun], index: int | None, shard: str | None) -> list[PlannedRun]:
    """Returns run `index`, or of shard 'i/n' every n-th run from the i-th on (counted from 0), or all runs.

    Raises:
      UserError: for an index or a shard which does not exist.
    """
    if index is not None and shard is not None:
        raise UserError('--index and --shard exclude each other; give one')
    if index is not None:
        if not 0 <= index < len(runs):
            raise UserError(f'--index = {index}; this sweep has runs 0 to {len(runs) - 1}')
        return [runs[index]]
    if shard is None:
        return list(runs)
    match = re.fullmatch(r'(\d+)/(\d+)', shard)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard = '{shard}' must be i/n with i from 0 to n - 1, such as 0/4")
    return list(runs)[int(match[1]) :: int(match[2])]


def describe(sweep: Sweep, base: Experiment) -> dict[str, Any]:
    """Returns the sweep as plain data, from which its report can be made without the file which defined it."""
    return {
        'name': sweep.name,
        'title': sweep.title,
        'baseline': sweep.baseline,
        'seeds': list(sweep.seeds),
        'heat_map': None if sweep.heat_map is None else list(sweep.heat_map),
        'variants': [{'name': point.name, 'overrides': to_plain(dict(point.overrides))} for point in sweep.points],
        'config': base.to_dict(),
    }


def check_workdir(workdir: Path, description: dict[str, Any], runs: Sequence[PlannedRun]) -> None:
    """Checks that a directory is new or holds this sweep; more seeds may be added, and nothing else may change.

    Raises:
      UserError: if it holds something else, with the differences.
    """
    workdir = Path(workdir)
    if (workdir / CONFIG_FILE).exists():
        raise UserError(f"'{workdir}' is the directory of a single run; give the sweep another --workdir")
    if (workdir / SWEEP_FILE).exists():
        old = read_sweep(workdir)
        if old['name'] != description['name']:
            raise UserError(
                f"'{workdir}' holds sweep '{old['name']}', not '{description['name']}'; give another --workdir"
            )
        found = differences(_comparable(old), _comparable(description), 'sweep')
        if found:
            raise UserError(
                f"'{workdir}' holds this sweep with other choices: {'; '.join(found)}; give another --workdir"
            )
    for run in runs:
        RunDirectory(run.directory).check(run.experiment)


def _comparable(description: dict[str, Any]) -> dict[str, Any]:
    variants = {variant['name']: variant['overrides'] for variant in description['variants']}
    kept = {name: description[name] for name in ('baseline', 'config')}
    return {**kept, 'variants': variants}


def write_sweep(workdir: Path, description: dict[str, Any], costs: Mapping[str, Cost], fair: Sequence[str]) -> None:
    """Writes what the sweep is; seeds which the directory has already stay in the list.

    Args:
      costs: of each arm; fair: what can be said of the fairness of their comparison.
    """
    Path(workdir).mkdir(parents=True, exist_ok=True)
    if (Path(workdir) / SWEEP_FILE).exists():
        old = read_sweep(workdir)['seeds']
        description = {**description, 'seeds': old + [seed for seed in description['seeds'] if seed not in old]}
    variants = [{**variant, 'cost': dataclasses.asdict(costs[variant['name']])} for variant in description['variants']]
    partial = Path(workdir) / f'{SWEEP_FILE}.partial'
    text = json.dumps({**description, 'variants': variants, 'fairness': list(fair)}, indent=2)
    partial.write_text(text + '\n')
    partial.replace(Path(workdir) / SWEEP_FILE)


def read_sweep(workdir: Path) -> dict[str, Any]:
    """Returns what `write_sweep` wrote.

    Raises:
      UserError: if there is no sweep in the directory.
    """
    path = Path(workdir) / SWEEP_FILE
    if not path.is_file():
        raise UserError(f"'{path}' is not there; give the workdir of a sweep of experiments.ablate")
    return json.loads(path.read_text())
