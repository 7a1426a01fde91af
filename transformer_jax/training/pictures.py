"""The pictures of a run: its curves, and what the decoder looked at in three sentences."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from transformer_jax.analysis.attention import AttentionMap, draw_attention
from transformer_jax.analysis.curves import draw_curves
from transformer_jax.training.metrics import METRICS_FILE, read_lines
from transformer_jax.training.setup import Run

SENTENCES = 3
LONGEST = 24


def draw(run: Run, params: Any, samples: list[dict[str, str]]) -> None:
    """Writes plots/curves.png and plots/attention_<n>.png of the first three samples which are short enough to read."""
    run.directory.plots.mkdir(exist_ok=True)
    draw_curves(read_lines(run.directory.path / METRICS_FILE), run.directory.plots / 'curves.png')
    shown = 0
    for sample in samples:
        source, target = (
            run.tokenizer.encode(sample[name])[: 4 * LONGEST] + [run.tokenizer.eos_id]
            for name in ('source', 'translation')
        )
        if shown < SENTENCES and max(len(source), len(target)) <= LONGEST:
            shown += 1
            maps = attention_maps(run, params, source, target)
            draw_attention(maps, run.directory.plots / f'attention_{shown}.png')


def attention_maps(run: Run, params: Any, source: list[int], target: list[int]) -> list[AttentionMap]:
    """Returns the cross-attention of the last decoder layer head by head and the mean over heads of each layer.

    `source` and `target` are ids, EOS included; row t shows the weights by which target token t was predicted.
    """
    inputs = {
        'source_tokens': np.asarray([source], np.int32),
        'target_tokens': np.asarray([[run.decode.decoder_start_id, *target[:-1]]], np.int32),
    }
    out = jax.jit(lambda p, x: run.model.apply({'params': p}, **x, return_attentions=True).cross_attentions)(
        params, inputs
    )
    layers = [np.asarray(weights, np.float32)[0] for weights in out]
    rows, columns = run.tokenizer.pieces(target), run.tokenizer.pieces(source)
    maps = [
        AttentionMap(f'layer {number}, mean of heads', weights.mean(0), rows, columns)
        for number, weights in enumerate(layers, 1)
    ]
    return maps + [
        AttentionMap(f'layer {len(layers)}, head {head}', weights, rows, columns)
        for head, weights in enumerate(layers[-1], 1)
    ]
