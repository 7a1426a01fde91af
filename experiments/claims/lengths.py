"""How positions are encoded, at the trained length and beyond it (Press et al. 2022; Peng et al. 2023)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.claims.finding import Finding, verdict
from experiments.claims.trained import experiment
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.config import ModelConfig
from transformer_jax.data.sources import iterate, open_split
from transformer_jax.models import build
from transformer_jax.subconfigs import RopeScaling
from transformer_jax.sweeps import overlay
from transformer_jax.training.loop import train
from transformer_jax.training.loss import cross_entropy
from transformer_jax.training.restore import load_run

TRAINED, FACTORS, STEPS = 64, (1, 2, 4), 900
JUDGED = 32  # last tokens of each window; the same ones for every length
SCHEMES = {
    'sinusoidal': {'position': 'sinusoidal'},
    'learned': {'position': 'learned', 'max_positions': TRAINED},
    'rope': {'position': 'rope'},
    'alibi': {'position': 'alibi'},
    'relative': {'position': 'relative'},
    'none': {'position': 'none'},
}
LANGUAGE_MODEL = {
    'model.kind': 'decoder',
    'model.tie_embeddings': 'output',
    'data.objective': 'causal_lm',
    'data.train': 'moby_dick',
    'data.target_length': TRAINED,
    'training.label_smoothing': 0.0,
    'training.steps': STEPS,
    'training.evaluate_every': STEPS,
    'training.checkpoint_every': STEPS,
}


def measure(figure: str) -> Finding:
    """Trains a causal language model per scheme and reads windows of one, two and four times its length."""
    loss: dict[str, list[float]] = {}
    for name, choice in SCHEMES.items():
        run = overlay(experiment(LANGUAGE_MODEL), {f'model.{field}': value for field, value in choice.items()})
        with tempfile.TemporaryDirectory() as folder:
            train(run, os.path.join(folder, 'run'))
            run = load_run(os.path.join(folder, 'run'))
        texts = [example['text'] for example in iterate(open_split(run.experiment.data, 'valid'))]
        text = np.concatenate(run.tokenizer.encode_all(texts))
        config = run.model.config
        reach = FACTORS[:1] if name == 'learned' else FACTORS
        loss[name] = [_loss(config, run.params, text, factor) for factor in reach]
        if name == 'rope':
            for kind in ('ntk', 'yarn'):
                loss[f'rope, {kind}'] = [loss[name][0]] + [
                    _loss(config.replace(rope_scaling=RopeScaling(kind, float(s), TRAINED)), run.params, text, s)
                    for s in FACTORS[1:]
                ]
    lengths = [TRAINED * factor for factor in FACTORS]
    lines = [Line(name, lengths[: len(values)], values) for name, values in loss.items()]
    title = f'Trained on {TRAINED} tokens, {STEPS} steps'
    panel = Panel('tokens of a window', f'loss of its last {JUDGED} [nats a token]', lines, 'log x')
    draw_panels(title, [panel], figure)
    rise = {name: values[-1] - values[0] for name, values in loss.items() if len(values) == len(FACTORS)}
    return Finding(
        'Rotation, biases and relative positions go beyond the trained length, where sinusoids fail and a learned '
        'table ends; NTK-aware scaling and YaRN extend rotation; a decoder needs positions.',
        f'Loss (nats a token) of the same tokens, the last {JUDGED} of windows of {", ".join(map(str, lengths))}: '
        + '; '.join(f'{name} {", ".join(f"{value:.2f}" for value in values)}' for name, values in loss.items())
        + f'. A learned table has no row {TRAINED + 1}, which is an error here. No scaled rotation was trained on.',
        verdict(
            all(rise[name] < 0.5 * rise['sinusoidal'] for name in ('rope', 'alibi', 'relative')),
            rise['rope, ntk'] < rise['rope'] and rise['rope, yarn'] < rise['rope'],
            loss['none'][0] > max(values[0] for name, values in loss.items() if name != 'none'),
        ),
    )  # fmt: skip


def _loss(config: ModelConfig, params: Any, text: Sequence[int], factor: int) -> float:
    """Returns the mean loss of the last tokens of windows of `factor` times the trained length."""
    longest, length = TRAINED * FACTORS[-1], TRAINED * factor
    rows = (len(text) - 1) // longest
    inputs, labels = (
        np.asarray(text[shift : shift + rows * longest], np.int32).reshape(rows, longest)[:, -length:]
        for shift in (0, 1)
    )
    judged = np.broadcast_to(np.arange(length) >= length - JUDGED, labels.shape).astype(np.float32)
    model = build(config)

    @jax.jit
    def loss(params):
        return cross_entropy(model.apply({'params': params}, inputs).logits, labels, judged)

    total, weight = loss(params)[:2]
    return float(total / weight)
