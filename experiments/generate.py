"""Translates standard input line by line: python -m experiments.generate --workdir=DIR < in.txt > out.txt.

Answers come in the order of the lines, one a line; with --num_return=N, N lines each; with --scores, score<TAB>text.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the project's directory, not experiments/, belongs on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from absl import flags

from experiments import common
from experiments.screen import Counter
from transformer_jax.errors import UserError
from transformer_jax.training.restore import load_run
from transformer_jax.training.translate import translate

flags.DEFINE_string('workdir', None, 'run directory')
flags.DEFINE_integer('step', None, 'step of the checkpoint (default: the averaged or newest one)')
flags.DEFINE_integer('batch', 64, 'most lines translated at a time')
flags.DEFINE_integer('beam_size', None, 'beam size (default: as the run has it)')
flags.DEFINE_integer('num_return', 1, 'answers a line, best first')
flags.DEFINE_bool('scores', False, 'put the score and a tab in front of each answer')


def main() -> int:
    """Reads all lines, translates them in batches by length, writes the answers in order."""
    options = flags.FLAGS
    if options.workdir is None:
        raise UserError('--workdir is missing; give the run directory of python -m experiments.train')
    if options.batch < 1:
        raise UserError(f'--batch = {options.batch} must be 1 or more')
    common.show_logs(lambda text: print(text, file=sys.stderr))
    run = load_run(options.workdir, options.step)
    if not run.evaluator(run.decode).references:
        objective = run.experiment.data.objective
        raise UserError(f"this run's objective is '{objective}'; only a run of 'translation' can translate lines")
    changes = {} if options.beam_size is None else {'beam_size': options.beam_size}
    decode = run.decode.replace(num_return=options.num_return, **changes)
    try:
        lines = sys.stdin.buffer.read().decode('utf-8').removesuffix('\n').split('\n')
    except UnicodeDecodeError as error:
        raise UserError(f'standard input is not UTF-8 at byte {error.start}; convert it') from error
    lines = [line.removesuffix('\r') for line in lines] if lines != [''] else []
    counter = Counter(len(lines))
    answers = translate(
        run.model, run.params, run.tokenizer, lines, decode,
        longest=run.experiment.data.source_length, rows=options.batch, progress=counter.add,
    )  # fmt: skip
    counter.close()
    for line_answers in answers:
        for answer in line_answers:
            print(f'{answer.score:.4f}\t{answer.text}' if options.scores else answer.text)
    return 0


if __name__ == '__main__':
    common.run(main)
