"""Trains a model and judges it: python -m experiments.train [--config=FILE] [--config.GROUP.FIELD=VALUE].

The same command after an interruption goes on from the newest checkpoint in the workdir. On TPU pods, SLURM and GKE the
processes find each other; elsewhere --coordinator, --process_id and --process_count say who they are (docs/pods.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the project's directory, not experiments/, belongs on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from absl import flags

from experiments import common, processes
from experiments.screen import TrainingScreen, duration
from transformer_jax.data.config import FORMS
from transformer_jax.training.loop import train

flags.DEFINE_string('workdir', None, 'run directory (default: runs/<name of the config>)')


def main() -> int:
    """Runs the experiment of the flags and prints scores and sample translations."""
    experiment = common.experiment()
    workdir = flags.FLAGS.workdir or f'runs/{experiment.name}'
    screen = TrainingScreen(experiment.training.steps, FORMS[experiment.data.objective].unit, processes.join())
    common.show_logs(screen.message)
    screen.message(f'run directory: {Path(workdir).absolute()}')
    result = train(experiment, workdir, screen.report)
    if result.get('interrupted'):
        return 0
    for sample in result['samples']:
        screen.message('\n'.join(f'{name:>12}: {text}' for name, text in sample.items()) + '\n')
    for split in ('valid', 'test'):
        if split in result:
            screen.message(f'{split}: loss {result[split]["loss"]:.4f}, {result[split]["scores"]}')
    screen.message(f'{result["step"]} steps in {duration(result["seconds_trained"])}; everything is in {workdir}')
    return 0


if __name__ == '__main__':
    common.run(main, common.define_config)
