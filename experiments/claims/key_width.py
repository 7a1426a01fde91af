"""Does a smaller d_k hurt? (Vaswani et al. 2017, table 3, rows B)"""

from __future__ import annotations

import itertools

from experiments.claims.finding import Finding, seed_bars, verdict
from experiments.claims.trained import STEPS, mean, results
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.sweeps import axis

WIDTHS = (16, 8, 4, 2)


def measure(figure: str) -> Finding:
    """Trains with narrower queries and keys, values as they are, two seeds each."""
    found = results(axis('model.d_k', WIDTHS), changes={'model.d_v': WIDTHS[0]})
    loss = [mean(runs) for runs in found.values()]
    apart = max(abs(one['loss'] - other['loss']) for one, other in found.values())
    title = f'Width of keys, d_v = {WIDTHS[0]}, {STEPS} steps'
    draw_bars(title, {'validation loss [nats a token]': seed_bars(found)}, figure)
    return Finding(
        'Narrower keys (a smaller d_k) make the model worse.',
        'Losses of '
        + ', '.join(f'{value:.3f} ({width})' for width, value in zip(WIDTHS, loss, strict=True))
        + f' nats a token by d_k; two seeds of one arm differ by up to {apart:.3f}.',
        verdict(loss[-1] - loss[0] > apart, all(wide < narrow for wide, narrow in itertools.pairwise(loss))),
    )
