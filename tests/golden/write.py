"""Flattens every config and every sweep to text; `python -m tests.golden.write` rewrites the golden files.

A review then shows which experiments a change touches.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments import ablate, common
from transformer_jax.sweeps.plan import plan
from transformer_jax.training.config import Experiment

GOLDEN = Path(__file__).parent


def texts() -> dict[str, str]:
    """Returns the text of each golden file by its name: one line for each field of a config or run of a sweep."""
    configs = {
        f'config_{path.stem}.txt': _lines(
            f'{name} = {value!r}' for name, value in _flat(_experiment(f'experiments.configs.{path.stem}').to_dict())
        )
        for path in sorted(Path(common.DEFAULT_CONFIG).parent.glob('[a-z]*.py'))
    }
    base = _experiment(f'experiments.configs.{Path(ablate.CONFIG).stem}')
    sweeps = {f'sweep_{path.stem}.txt': _sweep(path.stem, base) for path in sorted(ablate.SWEEPS.glob('[a-z]*.py'))}
    return configs | sweeps


def _sweep(name: str, base: Experiment) -> str:
    sweep = importlib.import_module(f'experiments.sweeps.{name}').get_sweep()
    before = dict(_flat(base.to_dict()))
    lines = []
    for run in plan(sweep, base, Path('.')):
        changed = [
            f'{name} = {value!r}'
            for name, value in _flat(run.experiment.to_dict())
            if name not in ('name', 'training.seed') and before.get(name, '') != value
        ]
        mark = ' (baseline)' if run.variant == sweep.baseline else ''
        lines.append(f'{run.index}: {run.variant}{mark}, seed {run.seed}: {", ".join(changed) or "the config itself"}')
    return _lines(lines)


def _experiment(module: str) -> Experiment:
    return Experiment.from_dict(importlib.import_module(module).get_config().to_dict())


def _flat(values: Mapping[str, Any], above: str = '') -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f'{above}{name}.')
        else:
            yield f'{above}{name}', value


def _lines(lines: Any) -> str:
    return ''.join(f'{line}\n' for line in lines)


if __name__ == '__main__':
    for old in GOLDEN.glob('*.txt'):
        old.unlink()
    for name, text in texts().items():
        (GOLDEN / name).write_text(text)
