"""Plain curves, told apart by colour, line and marker, so that they can be read in grey and by the colour-blind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax.analysis.figure import new_figure

# Okabe and Ito's palette, dark colours first.
COLOURS = ('#000000', '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#7F7F7F')
STYLES = ('-', '--', '-.', ':')
MARKERS = 'osD^vP*X'
_MANY = 5  # more curves than this leave no room for their names between them


def look(index: int) -> dict[str, Any]:
    """Returns colour, line style and marker of the index-th curve."""
    return {
        'color': COLOURS[index % len(COLOURS)],
        'linestyle': STYLES[index % len(STYLES)],
        'marker': MARKERS[index % len(MARKERS)],
        'markersize': 4,
        'linewidth': 1.6,
    }


class Line(NamedTuple):
    """A named curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """Curves over one pair of axes; `scale` is 'linear', 'log' (both axes), 'log x' or 'log y'."""

    x: str
    y: str
    lines: Sequence[Line]
    scale: str = 'linear'


def draw_panels(title: str, panels: Sequence[Panel], path: Path) -> Any:
    """Writes a PNG with the panels side by side; returns the figure."""
    figure = new_figure(0.6 + 4.0 * len(panels), 3.6)
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for index, line in enumerate(panel.lines):
            axes.plot(line.x, line.y, label=line.name, **look(index))
        axes.set(xlabel=panel.x, ylabel=panel.y)
        if panel.scale in ('log', 'log x'):
            axes.set_xscale('log', base=2)
            axes.set_xticks(panel.lines[0].x, [f'{x:g}' for x in panel.lines[0].x])
        if panel.scale in ('log', 'log y'):
            axes.set_yscale('log')
        axes.grid(alpha=0.3)
        if len(panel.lines) > _MANY:
            axes.legend(fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
        elif len(panel.lines) > 1:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    return figure
