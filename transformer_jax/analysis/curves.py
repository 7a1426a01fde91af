"""Curves of a run: loss, rate, scores and accuracy by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax.analysis.figure import new_figure

PANELS = (
    ('loss [nats]', (('train/loss', 'training, as optimised'), ('valid/loss', 'validation, plain labels'))),
    ('learning rate', (('train/rate', ''),)),
    ('BLEU', (('valid/bleu', 'validation, first sentences'),)),
    ('bits a byte', (('valid/bits_per_byte', 'validation'),)),
    ('accuracy', (('valid/accuracy', 'validation'),)),
    ('gradient norm', (('train/gradient_norm', ''),)),
)


def draw_curves(lines: Sequence[dict[str, Any]], path: Path) -> Any:
    """Writes a PNG with one panel for each quantity that was logged; returns the figure.

    Args:
      lines: of a metrics file: {'step', 'train/loss', ...}; null stands for a number that was not finite.
    """
    panels = []
    for title, named in PANELS:
        found = [(label, [(line['step'], line[name]) for line in lines if line.get(name) is not None])
                 for name, label in named]  # fmt: skip
        found = [(label, points) for label, points in found if points]
        if found:
            panels.append((title, found))
    figure = new_figure(4.5 * max(len(panels), 1), 3.4)
    for axes, (title, curves) in zip(figure.subplots(1, max(len(panels), 1), squeeze=False)[0], panels, strict=False):
        for label, points in curves:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, marker='o' if len(points) < 30 else None, markersize=3, label=label)
        axes.set_title(title)
        axes.set_xlabel('step')
        axes.grid(alpha=0.3)
        if any(label for label, _ in curves):
            axes.legend()
    figure.savefig(path, dpi=120)
    return figure
