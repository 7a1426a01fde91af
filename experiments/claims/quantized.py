"""int8 and int4 weights: memory and quality."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import jax
import numpy as np

from experiments.claims.finding import Finding, bars, verdict
from experiments.claims.trained import STEPS, experiment
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.data.sources import open_split
from transformer_jax.models import build, unroll_params
from transformer_jax.quantization import dequantize, quantize
from transformer_jax.training.loop import train
from transformer_jax.training.restore import load_run

WAYS = ('none', 'int8', 'int4')


def measure(figure: str) -> Finding:
    """Trains one model, rounds its weights, and takes the loss of the validation split again."""
    with tempfile.TemporaryDirectory() as folder:
        train(experiment(), os.path.join(folder, 'run'))
        run = load_run(os.path.join(folder, 'run'))
    model = build(run.model.config.replace(layer_stack='unrolled'))
    full = jax.tree.map(np.asarray, unroll_params(run.params, run.model.config))
    evaluator, source = run.evaluator(run.decode), open_split(run.experiment.data, 'valid')
    size, loss = {}, {}
    for way in WAYS:
        own, params = quantize(model, full, way)
        size[way] = _argument_bytes(own, params)
        loss[way] = evaluator.loss(jax.tree.map(np.asarray, dequantize(params)), source)['loss']
    panels = {
        'parameters [KiB]': bars({way: value / 1024 for way, value in size.items()}, 'none'),
        'validation loss [nats a token]': bars(loss, 'none'),
    }
    draw_bars(f'Rounded weights, after {STEPS} steps', panels, figure)
    return Finding(
        'int8 weights take a quarter of the memory at the same quality, int4 an eighth with some loss.',
        f'The compiled program takes {size["none"] / size["int8"]:.2f} times less for int8 and '
        f'{size["none"] / size["int4"]:.2f} times less for int4 than for fp32 (scales and norms counted); the loss is '
        f'{loss["none"]:.4f}, {loss["int8"]:.4f} and {loss["int4"]:.4f} nats a token.',
        verdict(
            size['none'] / size['int8'] > 3.5 and abs(loss['int8'] - loss['none']) < 0.01,
            size['none'] / size['int4'] > 6 and loss['int4'] > loss['none'],
        ),
    )


def _argument_bytes(model: Any, params: Any) -> int:
    """Returns the bytes of parameters which the compiled model takes; int4 is half a byte there."""
    tokens = np.zeros((1, 1), np.int32)

    def logits(params):
        return model.apply({'params': params}, source_tokens=tokens, target_tokens=tokens).logits

    return jax.jit(logits).lower(params).compile().memory_analysis().argument_size_in_bytes
