"""The factor 1 / sqrt(d_k) (Vaswani et al. 2017, section 3.2.1, footnote 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.finding import Finding, verdict
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.ops.attention import attention
from transformer_jax.ops.masks import Mask

WIDTHS = (4, 16, 64, 256, 1024)
BATCH, KEYS = 64, 64


def measure(figure: str) -> Finding:
    """Measures the variance of scores of unit-variance queries and keys, and the size of the softmax's derivative."""
    variances, slopes = {}, {}
    for name, power in (('no scale', 0.0), ('1 / sqrt(d_k)', -0.5)):
        found = [_scores(d_k, d_k**power) for d_k in WIDTHS]
        variances[name], slopes[name] = zip(*found, strict=True)
    draw_panels(
        'Scores of queries and keys of variance 1',
        [
            Panel('d_k', 'variance of the scores', [Line(*pair) for pair in _lines(variances)], 'log'),
            Panel('d_k', 'norm of d softmax / d scores', [Line(*pair) for pair in _lines(slopes)], 'log'),
        ],
        figure,
    )
    plain, scaled = variances['no scale'], variances['1 / sqrt(d_k)']
    slope, kept = slopes['no scale'], slopes['1 / sqrt(d_k)']
    return Finding(
        'Dot products have d_k times the variance; divided by sqrt(d_k) it is 1 again, and the softmax keeps its '
        'gradient.',
        f'Without the factor the variance is {plain[0]:.2f} at d_k = 4 and {plain[-1]:.0f} at 1,024, with it '
        f'{min(scaled):.2f} to {max(scaled):.2f}. The norm of the derivative of the softmax over {KEYS} keys falls '
        f'from {slope[0]:.3f} to {slope[-1]:.3f} without it, and is {min(kept):.3f} to {max(kept):.3f} with it.',
        verdict(
            all(abs(v / d - 1) < 0.1 for v, d in zip(plain, WIDTHS, strict=True)),
            all(abs(v - 1) < 0.1 for v in scaled),
            slope[-1] < slope[0] / 2 and max(kept) < 1.1 * min(kept),
        ),
    )


def _lines(values):
    return [(name, WIDTHS, numbers) for name, numbers in values.items()]


def _scores(d_k: int, scale: float) -> tuple[float, float]:
    keys = jax.random.split(jax.random.key(0), 2)
    query = jax.random.normal(keys[0], (BATCH, KEYS, 1, d_k))
    key = jax.random.normal(keys[1], (BATCH, KEYS, 1, d_k))
    weights = jax.jit(
        lambda q, k: attention(q, k, k, Mask(), scale=scale, backend='reference', return_weights=True)[1]
    )(query, key)
    p = np.asarray(weights, np.float64)
    # The derivative of a softmax is diag(p) - p p^T.
    squared = (p**2).sum(-1) - 2 * (p**3).sum(-1) + (p**2).sum(-1) ** 2
    scores = scale * np.asarray(jnp.einsum('BTNH,BSNH->BNTS', query, key))
    return float(scores.var()), float(np.sqrt(np.maximum(squared, 0)).mean())
