"""Operands in bfloat16: what is saved, and what it does to the outcome."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.finding import Finding, bars, verdict
from experiments.claims.timing import seconds
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.config import ModelConfig
from transformer_jax.models import build, init_params
from transformer_jax.training.loss import cross_entropy

TYPES = ('float32', 'bfloat16')


def measure(figure: str) -> Finding:
    """Takes loss and gradient of one batch in both types, parameters in fp32."""
    memory, times, losses, gradients = zip(*map(_cost, TYPES), strict=True)
    panels = {
        what: bars(dict(zip(TYPES, values, strict=True)), 'float32')
        for what, values in (('temporary memory [MiB]', memory), ('milliseconds', times))
    }
    draw_bars('The gradient of a decoder of 4 layers, D 256, 8 x 128 tokens', panels, figure)
    off = float(np.linalg.norm(gradients[1] - gradients[0]) / np.linalg.norm(gradients[0]))
    return Finding(
        'bfloat16 halves the memory of activations and is faster where the hardware has it, at the same quality.',
        f'Memory {memory[1] / memory[0]:.2f} and time {times[1] / times[0]:.2f} times those of fp32; loss '
        f'{losses[1]:.4f} against {losses[0]:.4f}, gradient off by {off:.1%} of its norm.',
        verdict(memory[1] < 0.75 * memory[0], times[1] < times[0], abs(losses[1] - losses[0]) < 0.01, off < 0.05),
    )


def _cost(dtype: str):
    model = build(
        ModelConfig(
            kind='decoder',
            vocab_size=512,
            d_model=256,
            d_ff=1024,
            num_layers=4,
            num_heads=4,
            dropout=0.0,
            dtype=dtype,
            norm_position='pre',
            layer_stack='unrolled',
        )
    )
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 512, (8, 129))

    def loss(params, tokens):
        logits = model.apply({'params': params}, tokens[:, :-1]).logits
        total, weight = cross_entropy(logits, tokens[:, 1:], jnp.ones((8, 128)))
        return total / weight

    program = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
    value, gradient = program(params, tokens)
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(gradient)])
    memory = program.memory_analysis().temp_size_in_bytes / 2**20
    return memory, 1000 * seconds(program, params, tokens, calls=5), float(value), flat
