"""NTK-aware scaling of rotary positions: what becomes of the base."""

from __future__ import annotations

import numpy as np

from experiments.claims.finding import Finding, verdict
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.ops.rope import frequencies
from transformer_jax.subconfigs import RopeScaling

D, BASE = 128, 10_000.0


def measure(figure: str) -> Finding:
    """Reads the base off the frequencies which the library computes for several factors."""
    factors = (1, 2, 4, 8, 16)
    tables = {s: np.asarray(frequencies(D, BASE, RopeScaling('ntk', float(s)))[0], np.float64) for s in factors}
    # Frequency i is base^(-2 i / d), so neighbours have the ratio base^(-2 / d).
    bases = {s: float((table[0] / table[-1]) ** (D / (D - 2))) for s, table in tables.items()}
    pairs = range(D // 2)
    draw_panels(
        'Rotary frequencies under NTK-aware scaling',
        [
            Panel(
                'pair of features',
                'radians a token',
                [Line(f'factor {s}', pairs[::4], tables[s][::4]) for s in factors],
                'log y',
            )
        ],
        figure,
    )
    expected = [BASE * s ** (D / (D - 2)) for s in factors]
    slowest = tables[8][-1] / tables[1][-1]
    reached = any(np.isclose(found, 500_000, rtol=0.01) for found in bases.values())
    return Finding(
        'NTK-aware scaling raises the base, such as from 10,000 to 500,000.',
        f'The base is base · s^(d/(d-2)): for d = {D}, '
        + ', '.join(f'{bases[s]:,.0f} at s = {s}' for s in factors[1:])
        + f'. 500,000 is what other models were trained with. At s = 8 the slowest pair turns {slowest:.4f} times as'
        ' fast, exactly 1/8, and the fastest as fast as before.',
        verdict(np.allclose(list(bases.values()), expected, rtol=1e-4), reached),
    )
