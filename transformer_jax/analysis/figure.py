"""The one place where matplotlib is imported, when the first figure is drawn and never before."""

from __future__ import annotations

from typing import Any


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure of the given inches, on the canvas that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    return figure
