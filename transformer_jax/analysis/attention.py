"""Attention weights as pictures, tokens at both axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.analysis.figure import label_fonts, new_figure

COLUMNS = 4
INCHES_A_TOKEN = 0.2


class AttentionMap(NamedTuple):
    """Weights (T, S) of one panel; `rows` names the T tokens which look, `columns` the S tokens looked at.

    `row_axis` and `column_axis` say what these tokens are.
    """

    title: str
    weights: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    row_axis: str = 'target tokens'
    column_axis: str = 'source tokens'


def head_maps(
    layers: Sequence[np.ndarray], rows: Sequence[str], columns: Sequence[str], **axes: str
) -> list[AttentionMap]:
    """Returns one map for each layer and head of the weights of one sequence.

    Args:
      layers: L arrays (N, T, S), such as `[weights[0] for weights in out.cross_attentions]`; padding at their ends,
        beyond `rows` and `columns`, is cut off.
      axes: `row_axis` and `column_axis` of the maps.

    Raises:
      ValueError: if there are more tokens than weights.
    """
    maps = []
    for number, weights_NTS in enumerate(layers, 1):
        for head, weights in enumerate(np.asarray(weights_NTS, np.float32), 1):
            if len(rows) > weights.shape[0] or len(columns) > weights.shape[1]:
                raise ValueError(f'{len(rows)} x {len(columns)} tokens are more than weights of shape {weights.shape}')
            own = weights[: len(rows), : len(columns)]
            maps.append(AttentionMap(f'layer {number}, head {head}', own, rows, columns, **axes))
    return maps


def draw_attention(maps: Sequence[AttentionMap], path: Path) -> Any:
    """Writes a PNG of several maps side by side, darker for larger weights; returns the figure.

    Tokens in scripts which matplotlib's own font lacks are written in a font of this machine which has them.
    """
    across = min(COLUMNS, len(maps))
    down = math.ceil(len(maps) / across)
    width = INCHES_A_TOKEN * max(len(each.columns) for each in maps) + 1.7
    height = INCHES_A_TOKEN * max(len(each.rows) for each in maps) + 1.7
    figure = new_figure(across * width, down * height)
    panels = figure.subplots(down, across, squeeze=False).flat
    look = {'fontsize': 8, 'family': label_fonts(piece for each in maps for piece in (*each.rows, *each.columns))}
    for axes, each in zip(panels, maps, strict=False):
        top = float(each.weights.max())
        axes.imshow(each.weights, cmap='Blues', vmin=0, vmax=top, aspect='auto')
        axes.set_title(f'{each.title} (darkest: {top:.2f})', fontsize=9)
        axes.set_xticks(range(len(each.columns)), [_label(piece) for piece in each.columns], rotation=90, **look)
        axes.set_yticks(range(len(each.rows)), [_label(piece) for piece in each.rows], **look)
        axes.set_xlabel(each.column_axis, fontsize=8)
        axes.set_ylabel(each.row_axis, fontsize=8)
    for axes in list(figure.axes)[len(maps) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=120)
    return figure


def _label(piece: str) -> str:
    """Returns a piece as a label: matplotlib would read a dollar sign as mathematics."""
    return piece.replace('$', r'\$')
