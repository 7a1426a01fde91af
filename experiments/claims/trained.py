"""Small trainings, which claims about whole trainings compare."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.configs import ablation
from transformer_jax.sweeps import overlay
from transformer_jax.sweeps.language import Points
from transformer_jax.training.config import Experiment
from transformer_jax.training.loop import NotFinite, train

STEPS = 300


def experiment(changes: Mapping[str, Any] | None = None) -> Experiment:
    """Returns configs/ablation.py with `STEPS` steps, judged once at the end by a short greedy search."""
    short = {
        'training.steps': STEPS,
        'training.evaluate_every': STEPS,
        'training.checkpoint_every': STEPS,
        'optimizer.warmup_steps': 50,
        'decode.beam_size': 1,
        'decode.max_new_tokens_over_source': 5,
    }
    return overlay(Experiment.from_dict(ablation.get_config().to_dict()), {**short, **(changes or {})})


def results(
    points: Points, seeds: Sequence[int] = (0, 1), changes: Mapping[str, Any] | None = None
) -> dict[str, list[dict[str, float]]]:
    """Trains once for each point and seed; returns what the validation split gave, a loss of inf where it diverged."""
    found: dict[str, list[dict[str, float]]] = {point.name: [] for point in points}
    for point in points:
        for seed in seeds:
            run = overlay(experiment(changes), {**point.overrides, 'training.seed': seed})
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[point.name].append(train(run, os.path.join(folder, 'run'))['valid'])
                except NotFinite:
                    found[point.name].append({'loss': math.inf, 'perplexity': math.inf, 'accuracy': 0.0})
    return found


def mean(found: Sequence[Mapping[str, float]], metric: str = 'loss') -> float:
    """Returns the mean of a metric over seeds."""
    return math.fsum(one[metric] for one in found) / len(found)
