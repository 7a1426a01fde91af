"""How long the runs of a sweep are expected to take."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from transformer_jax.sweeps.cost import Cost
from transformer_jax.sweeps.plan import PlannedRun
from transformer_jax.training.config import Experiment
from transformer_jax.training.loop import train
from transformer_jax.training.run_directory import RunDirectory


def trial(experiment: Experiment, steps: int = 12) -> float:
    """Returns measured seconds per FLOP of a few training steps of this experiment, compilation left out."""
    speeds: list[float] = []
    short = dataclasses.replace(
        experiment,
        data=experiment.data.replace(valid='none', test='none'),
        training=dataclasses.replace(
            experiment.training, steps=steps, log_every=steps // 3, checkpoint_every=steps, bleu_every=None,
            best_metric='loss', average_last=1,
        ),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(short, folder, lambda step, values: speeds.append(values['flops_per_second']))
    return 1 / float(np.median(speeds))


def seconds_per_flop(runs: Sequence[PlannedRun], costs: Mapping[str, Cost]) -> tuple[float, str]:
    """Returns the pace by which the time of runs is expected, and in words where it comes from.

    Runs of the sweep which are finished give it, compilation, evaluation and translation included; without any, a
    short trial of the first run.
    """
    seconds = flops = 0.0
    for run in runs:
        result = RunDirectory(run.directory).result()
        if result is not None:
            seconds, flops = seconds + result['seconds_trained'], flops + costs[run.variant].flops
    if flops:
        return seconds / flops, 'from the runs which are finished, evaluation and translation included'
    return trial(runs[0].experiment), f"from a trial of '{runs[0].variant}', training steps alone"
