"""What the runs of a sweep found, read from their directories."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.data.sources import iterate, open_split
from transformer_jax.sweeps.cost import Cost
from transformer_jax.sweeps.plan import folder, read_sweep
from transformer_jax.sweeps.runner import DIVERGED, ENDED, FINISHED, failure, status
from transformer_jax.sweeps.statistics import Interval, interval
from transformer_jax.training.finish import TRANSLATIONS_FILE
from transformer_jax.training.metrics import METRICS_FILE, read_lines
from transformer_jax.training.run_directory import RunDirectory
from transformer_jax.training.significance import bootstrap_p_value


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One run: its status, its numbers if it is finished, and the validation losses on the way.

    Attributes:
      loss, perplexity, bleu: on the validation split; NaN where there are none.
      seconds_per_step: median over log lines of training, evaluation left out.
      curve: (step, validation loss) pairs.
      translations: of the validation split, in its order.
      message: why it failed.
    """

    seed: int
    status: str
    loss: float = math.nan
    perplexity: float = math.nan
    bleu: float = math.nan
    seconds_per_step: float = math.nan
    devices: str = ''
    curve: tuple[tuple[int, float], ...] = ()
    translations: tuple[str, ...] = ()
    message: str = ''


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant of a sweep with all its runs, and how it compares with the baseline.

    Attributes:
      perplexity, bleu, seconds_per_step: over the seeds which finished.
      perplexity_difference, bleu_difference: to the baseline, over the seeds which finished in both, paired by seed.
      p_value: of the difference in BLEU; NaN for the baseline and where there are no translations.
    """

    name: str
    overrides: Mapping[str, Any]
    cost: Cost
    runs: tuple[RunResult, ...]
    perplexity: Interval
    bleu: Interval
    seconds_per_step: Interval
    perplexity_difference: Interval
    bleu_difference: Interval
    p_value: float

    @property
    def finished(self) -> tuple[RunResult, ...]:
        """The runs which have a result."""
        return tuple(run for run in self.runs if run.status == FINISHED)

    @property
    def diverged(self) -> int:
        """How many runs were stopped because loss or gradient was not finite."""
        return sum(run.status == DIVERGED for run in self.runs)


@dataclasses.dataclass(frozen=True)
class SweepResults:
    """Everything which a report says of a sweep; `description` is its sweep.json."""

    description: Mapping[str, Any]
    arms: tuple[Arm, ...]

    @property
    def baseline(self) -> Arm:
        """The arm with which the others are compared."""
        return next(arm for arm in self.arms if arm.name == self.description['baseline'])


def read_results(workdir: Path) -> SweepResults:
    """Returns the results of the runs in the directory of a sweep, of those which have ended and those which have not.

    Raises:
      UserError: if there is no sweep in the directory, or a run of another in it.
    """
    description = read_sweep(workdir)
    runs = {
        variant['name']: tuple(
            _read_run(Path(workdir) / folder(variant['name']) / f'seed={seed}', seed) for seed in description['seeds']
        )
        for variant in description['variants']
    }
    references = _references(workdir, description)
    baseline = runs[description['baseline']]
    arms = [
        _arm(variant, runs[variant['name']], baseline if variant['name'] != description['baseline'] else (), references)
        for variant in description['variants']
    ]
    return SweepResults(description, tuple(arms))


def _read_run(directory: Path, seed: int) -> RunResult:
    state = status(directory)
    lines = read_lines(directory / METRICS_FILE)
    curve = tuple((line['step'], line['valid/loss']) for line in lines if line.get('valid/loss') is not None)
    if state != FINISHED:
        message = failure(directory)['message'] if state in ENDED else ''
        return RunResult(seed, state, curve=curve, message=message)
    result = RunDirectory(directory).result()
    valid, translations = result['valid'], directory / TRANSLATIONS_FILE.format(split='valid')
    paces = [line['train/seconds_per_step'] for line in lines if 'train/seconds_per_step' in line]
    return RunResult(
        seed, state, valid['loss'], valid.get('perplexity', math.nan), valid.get('bleu', math.nan),
        statistics.median(paces), result['devices'], curve,
        tuple(translations.read_text().split('\n')[:-1]) if translations.is_file() else (),
    )  # fmt: skip


def _references(workdir: Path, description: Mapping[str, Any]) -> list[str]:
    """Returns the target texts of the validation split, empty where no run has translations."""
    name = description['baseline']
    for seed in description['seeds']:
        directory = Path(workdir) / folder(name) / f'seed={seed}'
        if (directory / TRANSLATIONS_FILE.format(split='valid')).is_file():
            source = open_split(RunDirectory(directory).experiment().data, 'valid')
            return [pair['target'] for pair in iterate(source)]
    return []


def _arm(
    variant: Mapping[str, Any], runs: Sequence[RunResult], baseline: Sequence[RunResult], references: Sequence[str]
) -> Arm:
    finished = [run for run in runs if run.status == FINISHED]
    others = {run.seed: run for run in baseline if run.status == FINISHED}
    pairs = [(others[run.seed], run) for run in finished if run.seed in others]
    translated = pairs and references and all(
        len(run.translations) == len(references) for pair in pairs for run in pair
    )  # fmt: skip
    p_value = math.nan
    if translated:
        olds, news = zip(*((old.translations, new.translations) for old, new in pairs), strict=True)
        p_value = bootstrap_p_value(olds, news, references)
    return Arm(
        variant['name'], variant['overrides'], Cost(**variant['cost']), tuple(runs),
        *(interval([getattr(run, name) for run in finished]) for name in ('perplexity', 'bleu', 'seconds_per_step')),
        *(interval([getattr(new, name) - getattr(old, name) for old, new in pairs]) for name in ('perplexity', 'bleu')),
        p_value,
    )  # fmt: skip
