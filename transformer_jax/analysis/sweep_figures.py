"""Figures of a sweep as PNG and PDF, readable in grey print and by the colour-blind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.analysis.figure import new_figure
from transformer_jax.analysis.lines import COLOURS, look


class Curve(NamedTuple):
    """One arm: for each seed its (step, value) pairs."""

    name: str
    seeds: tuple[tuple[tuple[int, float], ...], ...]


class Bar(NamedTuple):
    """One arm: mean, half its interval (NaN: none), the value of each seed, and whether it is the baseline."""

    name: str
    mean: float
    half: float
    values: tuple[float, ...]
    baseline: bool


def draw_sweep_curves(title: str, curves: Sequence[Curve], path: Path) -> Any:
    """Draws the mean over seeds of each arm by step, in a band from the lowest seed to the highest.

    The vertical axis leaves out the first quarter of the steps, in which all arms fall steeply.
    """
    figure = new_figure(7.0, 4.6)
    axes = figure.subplots()
    low, high = math.inf, -math.inf
    for index, curve in enumerate(curves):
        common = sorted(set.intersection(*(set(dict(seed)) for seed in curve.seeds)))
        values = np.array([[dict(seed)[step] for step in common] for seed in curve.seeds])
        axes.fill_between(
            common, values.min(axis=0), values.max(axis=0), color=COLOURS[index % len(COLOURS)], alpha=0.15, linewidth=0
        )
        axes.plot(common, values.mean(axis=0), label=curve.name, **look(index))
        late = values[:, [step >= common[-1] / 4 for step in common]]
        low, high = min(low, late.min()), max(high, late.max())
    margin = 0.05 * (high - low) or 0.05
    axes.set(title=title, xlabel='step', ylabel='validation loss [nats a token]', ylim=(low - margin, high + margin))
    axes.grid(alpha=0.3)
    axes.legend(title='mean; band: lowest to highest seed', fontsize=8, title_fontsize=8)
    return _save(figure, path)


def draw_bars(title: str, panels: Mapping[str, Sequence[Bar]], path: Path) -> Any:
    """Draws a panel of horizontal bars for each quantity: mean, 95 % interval, and a point for each seed.

    Bars begin at 0. Where that would hide what there is to see, the axis is cut and means are dots instead.
    """
    count = max(len(bars) for bars in panels.values())
    figure = new_figure(1.5 + 3.6 * len(panels), 1.4 + 0.42 * count)
    figure.suptitle(title)
    for axes, (name, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        rows, (low, high) = range(len(bars)), _range(bars)
        for row, bar in zip(rows, bars, strict=True):
            if low == 0:
                hatch = '//' if bar.baseline else None
                axes.barh(row, bar.mean, height=0.6, color='#9ecae1', edgecolor='black', hatch=hatch, linewidth=0.8)
            else:
                axes.plot(bar.mean, row, 's' if bar.baseline else 'o', color='black', markersize=7)
            if not math.isnan(bar.half):
                axes.errorbar(bar.mean, row, xerr=bar.half, color='black', capsize=4, linewidth=1.4)
            axes.plot(bar.values, [row + 0.2] * len(bar.values), 'o', color='#D55E00', markersize=3.5)
        labels = [f'{bar.name} (baseline)' if bar.baseline else bar.name for bar in bars]
        axes.set_yticks(rows, labels if axes.get_subplotspec().is_first_col() else [''] * len(bars), fontsize=9)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        shown = ['mean', *(['95 % interval'] if any(not math.isnan(bar.half) for bar in bars) else []), 'seeds']
        axes.set_xlabel(f'{name}: {", ".join(shown)}' if bars[0].values else name, fontsize=9)
        axes.set_xlim(low, high)
        axes.set_axisbelow(True)
        axes.grid(axis='x', alpha=0.3)
    return _save(figure, path)


def _range(bars: Sequence[Bar]) -> tuple[float, float]:
    """Returns the limits of the axis: from 0, or around the numbers of seeds where these lie close together."""
    ends = [end for bar in bars for end in (bar.mean, *bar.values, *(() if math.isnan(bar.half) else _interval(bar)))]
    low, high = min(ends), max(ends)
    margin = 0.1 * (high - low) or 0.1
    return (low - margin, high + margin) if bars[0].values and low > 0.6 * high else (0.0, 1.05 * high)


def _interval(bar: Bar) -> tuple[float, float]:
    return bar.mean - bar.half, bar.mean + bar.half


def draw_heat_map(
    title: str, row_name: str, column_name: str, cells: Mapping[tuple[Any, Any], tuple[float, str]], what: str,
    path: Path,
) -> Any:  # fmt: skip
    """Draws numbers of two crossed axes as colours of one lightness scale, each with its text; NaN stays white."""
    rows, columns = (list(dict.fromkeys(key[side] for key in cells)) for side in (0, 1))
    values = np.array([[cells.get((row, column), (math.nan, ''))[0] for column in columns] for row in rows])
    figure = new_figure(2.6 + 1.15 * len(columns), 1.6 + 0.6 * len(rows))
    axes = figure.subplots()
    image = axes.imshow(values, cmap='cividis_r', aspect='auto')
    axes.set_xticks(range(len(columns)), [_shown(value) for value in columns])
    axes.set_yticks(range(len(rows)), [_shown(value) for value in rows])
    axes.set(title=title, xlabel=column_name, ylabel=row_name)
    middle = (np.nanmin(values) + np.nanmax(values)) / 2 if np.isfinite(values).any() else 0
    for (row, column), (value, text) in cells.items():
        dark = math.isfinite(value) and value > middle
        axes.text(columns.index(column), rows.index(row), text, ha='center', va='center', fontsize=9,
                  color='white' if dark else 'black')  # fmt: skip
    figure.colorbar(image, label=what)
    return _save(figure, path)


def _shown(value: Any) -> str:
    return f'{value:g}' if isinstance(value, float) else str(value)


def _save(figure: Any, path: Path) -> Any:
    for kind in ('png', 'pdf'):
        figure.savefig(Path(path).with_suffix(f'.{kind}'), dpi=150)
    return figure
