"""Judges a trained run on a split: python -m experiments.evaluate --workdir=DIR [--split=test] [--step=N]."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the project's directory, not experiments/, belongs on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from absl import flags

from experiments import common
from experiments.screen import Counter, Screen
from transformer_jax.data.sources import open_source, open_split
from transformer_jax.errors import UserError
from transformer_jax.training.restore import load_run

flags.DEFINE_string('workdir', None, 'run directory')
flags.DEFINE_string('split', 'test', 'train, valid or test, as the config of the run names them')
flags.DEFINE_string('data', None, 'another data set instead: pairs.tsv, file.en,file.de, soft.en-de or tfds:...')
flags.DEFINE_integer('step', None, 'step of the checkpoint (default: the averaged or newest one)')
flags.DEFINE_integer('beam_size', None, 'beam size (default: as the run has it)')
flags.DEFINE_string('output', None, 'file for the translations, one a line')


def main() -> int:
    """Prints what the objective reports, and of translations sacreBLEU and chrF with their signatures."""
    options = flags.FLAGS
    common.need_workdir()
    screen = Screen()
    common.show_logs(screen.message)
    run = load_run(options.workdir, options.step)
    data = run.experiment.data
    if options.data:
        source = open_source(options.data, options.split, data.direction, tfds_directory=data.tfds_directory)
    else:
        source = open_split(data, options.split)
    if source is None:
        raise UserError(f"the run's config leaves out data.{options.split}; name a data set by --data")
    changes = {} if options.beam_size is None else {'beam_size': options.beam_size}
    evaluator = run.evaluator(run.decode.replace(**changes))
    loss = evaluator.loss(run.params, source)
    if not evaluator.references:
        screen.message(f'{source.name}, checkpoint: {run.origin}')
        screen.message(', '.join(f'{name} {value:.6g}' for name, value in loss.items()))
        return 0
    counter = Counter(len(source))
    scores, hypotheses = evaluator.scores(run.params, source, counter.add)
    counter.close()
    if options.output:
        Path(options.output).write_text('\n'.join(hypotheses) + '\n')
    screen.message(f'{source.name}, {loss["examples"]} sentences, checkpoint: {run.origin}')
    screen.message(', '.join(f'{name} {loss[name]:.4f}' for name in ('loss', 'perplexity', 'accuracy')))
    screen.message(f'BLEU  {scores.bleu:.2f}  {scores.bleu_signature}')
    screen.message(f'BLEU  {scores.bleu_lowercase:.2f}  {scores.bleu_lowercase_signature}')
    screen.message(f'chrF  {scores.chrf:.2f}  {scores.chrf_signature}')
    return 0


if __name__ == '__main__':
    common.run(main)
