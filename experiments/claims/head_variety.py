"""Do heads look at different things? Measured in a model which is trained for it."""

from __future__ import annotations

import dataclasses
import tempfile

import jax
import numpy as np

from experiments.claims.finding import Finding, verdict
from experiments.configs import ablation
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.data.objectives import make_objective
from transformer_jax.data.pipeline import EvaluationPipeline
from transformer_jax.data.sources import open_split
from transformer_jax.training.config import Experiment
from transformer_jax.training.loop import train
from transformer_jax.training.restore import load_run


def measure(figure: str) -> Finding:
    """Trains configs/ablation.py and takes entropy, distance and agreement of its encoder's heads on 64 sentences."""
    base = Experiment.from_dict(ablation.get_config().to_dict())
    steps = base.training.steps
    training = dataclasses.replace(base.training, evaluate_every=steps)
    data = base.data.replace(evaluation_limit=64)
    with tempfile.TemporaryDirectory() as folder:
        train(dataclasses.replace(base, training=training, data=data), folder)
        run = load_run(folder)
    objective = make_objective(data, run.tokenizer, run.model.config)
    batch = EvaluationPipeline(open_split(data, 'valid'), run.tokenizer, objective, data).batch(0)
    look = jax.jit(lambda p, x: run.model.apply({'params': p}, **x, return_attentions=True).encoder_attentions)
    real = np.asarray(batch['inputs']['source_mask']).astype(bool)
    heads = [
        (layer, head) for layer in range(run.model.config.num_layers) for head in range(run.model.config.num_heads)
    ]
    layers = [np.asarray(weights, np.float64) for weights in look(run.params, batch['inputs'])]
    entropy, distance = zip(*(_look(layers[layer][:, head], real) for layer, head in heads), strict=True)
    agreement = [_agreement(weights, real) for weights in layers]
    names = [f'{layer + 1}.{head + 1}' for layer, head in heads]
    draw_panels(
        'Heads of the encoder, layer.head',
        [
            Panel('head', 'mean entropy [nats]', [Line('entropy', names, entropy)]),
            Panel('head', 'mean distance [tokens]', [Line('distance', names, distance)]),
        ],
        figure,
    )
    return Finding(
        'Different heads attend to different things: near words, far words, syntax.',
        f'After {steps:,} steps the mean entropy of heads is {min(entropy):.2f} to {max(entropy):.2f} nats, their mean '
        f'distance {min(distance):.1f} to {max(distance):.1f} tokens. Two heads of a layer look at the same tokens in '
        + ' and '.join(f'{value:.0%} (layer {layer})' for layer, value in enumerate(agreement, 1))
        + ' of their weight (1 minus the total variation distance). What they mean was not measured.',
        verdict(max(distance) > 1.5 * min(distance), max(agreement) < 0.8),
    )


def _look(weights_BTS: np.ndarray, real: np.ndarray) -> tuple[float, float]:
    """Returns mean entropy and mean distance over real tokens."""
    T = weights_BTS.shape[1]
    entropy = -np.sum(weights_BTS * np.log(np.maximum(weights_BTS, 1e-12)), axis=-1)
    distance = np.sum(weights_BTS * np.abs(np.arange(T)[:, None] - np.arange(T)), axis=-1)
    return float(entropy[real].mean()), float(distance[real].mean())


def _agreement(weights_BNTS: np.ndarray, real: np.ndarray) -> float:
    """Returns the mean shared weight, sum_s min(p_s, q_s), of pairs of heads of a layer."""
    N = weights_BNTS.shape[1]
    pairs = [(one, two) for one in range(N) for two in range(one)]
    shared = [np.minimum(weights_BNTS[:, one], weights_BNTS[:, two]).sum(-1)[real].mean() for one, two in pairs]
    return float(np.mean(shared))
