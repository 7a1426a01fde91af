"""Without positions an encoder cannot see order."""

from __future__ import annotations

import jax
import numpy as np

from experiments.claims.finding import Finding, bars, verdict
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.config import ModelConfig
from transformer_jax.models import build, init_params

POSITIONS = ('none', 'sinusoidal', 'rope', 'alibi', 'relative')


def measure(figure: str) -> Finding:
    """Compares the output of a permuted sentence with the permuted output of the sentence."""
    gaps, changes = zip(*map(_gap, POSITIONS), strict=True)
    draw_bars(
        'Encoder of random weights',
        {'largest |f(Px) - P f(x)|': bars(dict(zip(POSITIONS, gaps, strict=True)), 'none')},
        figure,
    )
    return Finding(
        'Without positions, the output does not change when the input is permuted.',
        f'It changes (by up to {changes[0]:.2f}), but only in order: f(Px) is P f(x) to {gaps[0]:.1e}. With '
        f'positions that fails by {min(gaps[1:]):.2f} to {max(gaps[1:]):.2f}. So the encoder is equivariant, not '
        'invariant, and blind to order all the same.',
        verdict(changes[0] < 1e-4, gaps[0] < 1e-4 and min(gaps[1:]) > 1e-2),
    )


def _gap(position: str) -> tuple[float, float]:
    model = build(
        ModelConfig(
            kind='encoder',
            vocab_size=50,
            d_model=32,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            position=position,
            head='none',
            tie_embeddings='none',
        )
    )
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    run = jax.jit(lambda tokens: model.apply({'params': params}, tokens).hidden)
    tokens = np.random.default_rng(0).permutation(50)[None, :16]
    order = np.random.default_rng(1).permutation(16)
    plain, permuted = np.asarray(run(tokens)), np.asarray(run(tokens[:, order]))
    return float(np.abs(permuted - plain[:, order]).max()), float(np.abs(permuted - plain).max())
