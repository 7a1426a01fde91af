"""Attention weights as pictures, tokens at both axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.analysis.figure import new_figure

COLUMNS = 4
INCHES_A_TOKEN = 0.2


class AttentionMap(NamedTuple):
    """Weights (T, S) of one panel; `rows` names the T tokens which look, `columns` the S tokens looked at."""

    title: str
    weights: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]


def draw_attention(maps: Sequence[AttentionMap], path: Path) -> Any:
    """Writes a PNG of several maps side by side, darker for larger weights; returns the figure."""
    across = min(COLUMNS, len(maps))
    down = math.ceil(len(maps) / across)
    width = INCHES_A_TOKEN * max(len(each.columns) for each in maps) + 1.5
    height = INCHES_A_TOKEN * max(len(each.rows) for each in maps) + 1.5
    figure = new_figure(across * width, down * height)
    panels = figure.subplots(down, across, squeeze=False).flat
    for axes, each in zip(panels, maps, strict=False):
        top = float(each.weights.max())
        axes.imshow(each.weights, cmap='Blues', vmin=0, vmax=top, aspect='auto')
        axes.set_title(f'{each.title} (darkest: {top:.2f})', fontsize=9)
        axes.set_xticks(range(len(each.columns)), [_label(piece) for piece in each.columns], rotation=90, fontsize=8)
        axes.set_yticks(range(len(each.rows)), [_label(piece) for piece in each.rows], fontsize=8)
    for axes in list(figure.axes)[len(maps) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=120)
    return figure


def _label(piece: str) -> str:
    """Returns a piece as a label: matplotlib would read a dollar sign as mathematics."""
    return piece.replace('$', r'\$')
