"""How many heads, at equal parameters? (Vaswani et al. 2017, table 3, rows A)"""

from __future__ import annotations

from experiments.claims.finding import Finding, seed_bars, verdict
from experiments.claims.trained import STEPS, mean, results
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.sweeps import axis

HEADS = (1, 2, 4, 8, 16)


def measure(figure: str) -> Finding:
    """Trains with h heads of width D / h, two seeds each."""
    found = results(axis('model.num_heads', HEADS))
    loss = dict(zip(HEADS, map(mean, found.values()), strict=True))
    apart = max(abs(one['loss'] - other['loss']) for one, other in found.values())
    title = f'Heads of width 64 / h, {STEPS} steps'
    draw_bars(title, {'validation loss [nats a token]': seed_bars(found)}, figure)
    best = min(loss, key=loss.get)
    return Finding(
        'Several heads are better than one of full width, and too many are worse again.',
        'Losses of '
        + ', '.join(f'{value:.3f} ({heads})' for heads, value in loss.items())
        + f' nats a token by number of heads; two seeds of one arm differ by up to {apart:.3f}. Best: {best}. '
        'A longer training with three seeds stands in [ablations.md](ablations.md).',
        verdict(loss[1] - loss[best] > apart, loss[HEADS[-1]] - loss[best] > apart),
    )
