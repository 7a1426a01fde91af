"""Recomputation: memory down, work up (Chen et al. 2016)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from experiments.claims.finding import Finding, bars, verdict
from experiments.claims.timing import seconds
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.config import ModelConfig
from transformer_jax.models import build, init_params
from transformer_jax.training.loss import cross_entropy

WAYS = ('none', 'dots', 'full')


def measure(figure: str) -> Finding:
    """Compiles the gradient of one batch for each way of recomputing; reads its memory and times it."""
    memory, times = zip(*map(_cost, WAYS), strict=True)
    panels = {
        what: bars(dict(zip(WAYS, values, strict=True)), 'none')
        for what, values in (('temporary memory [MiB]', memory), ('milliseconds', times))
    }
    draw_bars('The gradient of a decoder of 8 layers, 8 x 128 tokens', panels, figure)
    return Finding(
        'Recomputing activations in the backward pass takes less memory and more time.',
        f'Memory {memory[0]:.0f} MiB without, {memory[1]:.0f} MiB keeping products, {memory[2]:.0f} MiB keeping '
        f'nothing; time {times[1] / times[0]:.2f} and {times[2] / times[0]:.2f} times that without.',
        verdict(memory[2] < memory[1] < memory[0], times[2] > times[0]),
    )


def _cost(remat: str) -> tuple[float, float]:
    model = build(
        ModelConfig(
            kind='decoder', vocab_size=256, d_model=64, d_ff=256, num_layers=8, num_heads=4, dropout=0.0, remat=remat
        )
    )
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    tokens = jnp.ones((8, 128), jnp.int32)

    def loss(params, tokens):
        return cross_entropy(model.apply({'params': params}, tokens).logits, tokens, jnp.ones(tokens.shape))[0]

    program = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20, 1000 * seconds(program, params, tokens, calls=5)
