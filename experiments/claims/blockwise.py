"""Attention one block of queries at a time: memory against length (Rabe and Staats 2021)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.finding import Finding, verdict
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.ops.attention import attention
from transformer_jax.ops.masks import Mask

LENGTHS = (512, 1024, 2048, 4096)


def measure(figure: str) -> Finding:
    """Compiles attention and its gradient and reads how much temporary memory the programs ask for."""
    memory = {name: [_mebibytes(name, T) for T in LENGTHS] for name in ('reference', 'blockwise')}
    lines = [Line(name, LENGTHS, values) for name, values in memory.items()]
    panel = Panel('length', 'temporary memory [MiB]', lines, 'log')
    draw_panels('Attention, forward and backward, one head', [panel], figure)
    slopes = {name: np.polyfit(np.log(LENGTHS), np.log(values), 1)[0] for name, values in memory.items()}
    return Finding(
        'Blockwise attention needs memory in proportion to the length, not to its square.',
        f'From 512 to 4,096 tokens memory grows as T^{slopes["reference"]:.2f} with all scores held and as '
        f'T^{slopes["blockwise"]:.2f} blockwise; at 4,096 it is {memory["reference"][-1]:.0f} MiB against '
        f'{memory["blockwise"][-1]:.1f} MiB.',
        verdict(slopes['reference'] > 1.8, slopes['blockwise'] < 1.2),
    )


def _mebibytes(backend: str, T: int) -> float:
    def loss(query, key, value):
        return jnp.sum(attention(query, key, value, Mask(causal=True), scale=0.25, backend=backend)[0] ** 2)

    x = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
    return (
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes / 2**20
    )
