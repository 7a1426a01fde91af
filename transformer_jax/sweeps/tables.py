"""A sweep's results as a table in Markdown, CSV and LaTeX, and the sentences below it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from transformer_jax.sweeps.results import Arm, SweepResults
from transformer_jax.sweeps.runner import ENDED
from transformer_jax.sweeps.statistics import Interval

MISSING = '–'


class Column(NamedTuple):
    """A column of the printed table: its heading, and an arm's cell."""

    title: str
    cell: Callable[[Arm], str]


def _number(value: float, digits: int) -> str:
    return MISSING if math.isnan(value) else f'{value:.{digits}f}'


def _with_interval(found: Interval, digits: int, sign: bool = False) -> str:
    if math.isnan(found.mean):
        return MISSING
    mean = f'{found.mean:{"+" if sign else ""}.{digits}f}'
    return mean if math.isnan(found.half) else f'{mean} ± {found.half:.{digits}f}'


def _p_value(value: float) -> str:
    return MISSING if math.isnan(value) else '< 0.001' if value < 0.001 else f'{value:.3f}'


def columns(results: SweepResults) -> list[Column]:
    """Returns the columns of the table; those of BLEU are left out where nothing was translated."""
    found = [
        Column('variant', lambda arm: arm.name),
        Column('parameters', lambda arm: f'{arm.cost.parameters:,}'),
        Column('FLOPs/token', lambda arm: f'{arm.cost.flops_per_slot / 1e6:.2f} M'),
        Column('ms/step', lambda arm: _number(arm.seconds_per_step.mean * 1000, 0)),
        Column('perplexity', lambda arm: _with_interval(arm.perplexity, 2)),
        Column('Δ perplexity', lambda arm: _difference(arm, results, arm.perplexity_difference, 2)),
    ]
    if any(run.translations for arm in results.arms for run in arm.runs):
        found += [
            Column('BLEU', lambda arm: _with_interval(arm.bleu, 2)),
            Column('Δ BLEU', lambda arm: _difference(arm, results, arm.bleu_difference, 2)),
            Column('p', lambda arm: _p_value(arm.p_value)),
        ]
    return [*found, Column('runs', lambda arm: f'{len(arm.finished)}/{len(arm.runs)}'),
            Column('diverged', lambda arm: str(arm.diverged))]  # fmt: skip


def _difference(arm: Arm, results: SweepResults, found: Interval, digits: int) -> str:
    return 'baseline' if arm is results.baseline else _with_interval(found, digits, sign=True)


def markdown(results: SweepResults) -> str:
    """Returns the table as GitHub's Markdown."""
    shown = columns(results)
    rows = [[column.title for column in shown], ['---'] + ['--:'] * (len(shown) - 1)]
    rows += [[column.cell(arm).replace('|', '\\|') for column in shown] for arm in results.arms]
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows) + '\n'


_LATEX = {
    **{letter: f'\\{letter}' for letter in '_%&#${}'},
    **{'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}', MISSING: '--'},
    **{'±': r'$\pm$', 'Δ': r'$\Delta$', '<': '$<$', '>': '$>$'},
}


def latex(results: SweepResults) -> str:
    """Returns the table as a LaTeX tabular with the rules of the booktabs package."""
    shown = columns(results)

    def row(cells: Sequence[str]) -> str:
        return ' & '.join(''.join(_LATEX.get(letter, letter) for letter in cell) for cell in cells) + r' \\'

    lines = [r'\begin{tabular}{l' + 'r' * (len(shown) - 1) + '}', r'\toprule', row([column.title for column in shown]),
             r'\midrule', *(row([column.cell(arm) for column in shown]) for arm in results.arms),
             r'\bottomrule', r'\end{tabular}']  # fmt: skip
    return '\n'.join(lines) + '\n'


def comma_separated(results: SweepResults) -> str:
    """Returns every number in full, one row an arm: means with `_interval` beside them, half its width."""
    stream = io.StringIO()
    names = ('seconds_per_step', 'perplexity', 'perplexity_difference', 'bleu', 'bleu_difference')
    writer = csv.writer(stream, lineterminator='\n')
    numbered = [f'{name}{end}' for name in names for end in ('', '_interval')]
    counts = ['runs', 'finished', 'diverged']
    writer.writerow(['variant', 'parameters', 'flops_per_token', *numbered, 'bleu_p_value', *counts])
    for arm in results.arms:
        numbers = [value for name in names for value in getattr(arm, name)] + [arm.p_value]
        writer.writerow([
            arm.name, arm.cost.parameters, arm.cost.flops_per_slot,
            *('' if math.isnan(value) else repr(float(value)) for value in numbers),
            len(arm.runs), len(arm.finished), arm.diverged,
        ])  # fmt: skip
    return stream.getvalue()


def verdict(results: SweepResults) -> list[str]:
    """Returns in sentences which arms differ from the baseline in perplexity, by the interval over paired seeds."""
    better, worse, open_, lacking = [], [], [], []
    for arm in results.arms:
        found = arm.perplexity_difference
        if arm is results.baseline:
            continue
        if math.isnan(found.half):
            lacking.append(arm.name)
        elif not found.excludes_zero:
            open_.append(arm.name)
        else:
            (better if found.mean < 0 else worse).append(arm.name)
    seeds = len(results.description['seeds'])
    sentences = [(f'lower perplexity than {results.baseline.name}', better),
                 (f'higher perplexity than {results.baseline.name}', worse),
                 (f'no difference in perplexity which {seeds} seeds can show', open_),
                 ('fewer seeds done than an interval needs', lacking)]  # fmt: skip
    return [f'{what[0].upper()}{what[1:]}: {", ".join(names)}.' for what, names in sentences if names]


def notes(results: SweepResults) -> list[str]:
    """Returns what a reader must know of the numbers: how they were made, on what, how fair, and what is missing."""
    description, runs = results.description, [run for arm in results.arms for run in arm.runs]
    devices = sorted({run.devices for run in runs if run.devices})
    seeds = len(description['seeds'])
    lines = [
        f'± is the 95 % t interval over {seeds} seeds; differences are paired by seed.',
        "p is of sacreBLEU's paired bootstrap over sentences: 1,000 resamples, the translations of a sentence by all "
        'seeds drawn together.',
        'FLOPs are of matrix products in training, forward and backward, for each token slot, source and target.',
        f'Steps a run: {description["config"]["training"]["steps"]:,}, unless a variant says otherwise. '
        f'Device: {", ".join(devices) or "none yet"}.',
        *description['fairness'],
    ]  # fmt: skip
    waiting = sum(run.status not in ENDED for run in runs)
    if waiting:
        lines.append(f'{waiting} of {len(runs)} runs have not ended yet.')
    lines += [
        f'{arm.name}, seed {run.seed} {run.status}: {run.message}'
        for arm in results.arms
        for run in arm.runs
        if run.message
    ]
    return lines
