"""The pictures of a run: its curves, and what the decoder looked at in three sentences."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from transformer_jax.analysis.attention import AttentionMap, draw_attention
from transformer_jax.analysis.curves import draw_curves
from transformer_jax.decoding.placement import on_every_host
from transformer_jax.sharding import tracing_on
from transformer_jax.training.metrics import METRICS_FILE, read_lines
from transformer_jax.training.setup import Run

SENTENCES = 3
LONGEST = 24
_INPUTS = ('source_tokens', 'target_tokens', 'source_mask', 'target_mask')


def draw(run: Run, params: Any, samples: list[dict[str, str]]) -> None:
    """Writes plots/curves.png and plots/attention_<n>.png of the first three samples which are short enough to read.

    Every process of a run calls it, since parameters may lie on the devices of all; the first one draws.
    """
    pairs = []
    for sample in samples:
        source, target = (
            run.tokenizer.encode(sample[name]) + [run.tokenizer.eos_id] for name in ('source', 'translation')
        )
        if max(len(source), len(target)) <= LONGEST:
            pairs.append((source, target))
    found = attention_maps(run, params, pairs[:SENTENCES])
    if not run.is_first:
        return
    run.directory.plots.mkdir(exist_ok=True)
    draw_curves(read_lines(run.directory.path / METRICS_FILE), run.directory.plots / 'curves.png')
    for number, maps in enumerate(found, 1):
        draw_attention(maps, run.directory.plots / f'attention_{number}.png')


def attention_maps(run: Run, params: Any, pairs: list[tuple[list[int], list[int]]]) -> list[list[AttentionMap]]:
    """Returns for each pair the mean over heads of each decoder layer's cross-attention, and the last layer's heads.

    A pair is source and target ids, EOS included, at most 24 each; row t of a map shows the weights by which target
    token t was predicted.
    """
    if not pairs:
        return []
    inputs = {name: np.zeros((len(pairs), LONGEST), np.int32) for name in _INPUTS}
    for row, (source, target) in enumerate(pairs):
        shifted = [run.decode.decoder_start_id, *target[:-1]]
        for name, ids in zip(_INPUTS, (source, shifted, [1] * len(source), [1] * len(target)), strict=True):
            inputs[name][row, : len(ids)] = ids

    def look_at(params, inputs):
        with tracing_on(run.mesh):
            out = run.model.apply({'params': params}, **inputs, return_attentions=True)
            return on_every_host(out.cross_attentions)

    look = jax.jit(look_at)
    layers = [np.asarray(weights, np.float32) for weights in look(params, inputs)]
    found = []
    for row, (source, target) in enumerate(pairs):
        rows, columns = run.tokenizer.pieces(target), run.tokenizer.pieces(source)
        own = [weights[row, :, : len(target), : len(source)] for weights in layers]
        means = [(f'layer {number}, mean of heads', weights.mean(0)) for number, weights in enumerate(own, 1)]
        heads = [(f'layer {len(own)}, head {head}', weights) for head, weights in enumerate(own[-1], 1)]
        found.append([AttentionMap(title, weights, rows, columns) for title, weights in means + heads])
    return found
