"""Translates, or continues, standard input line by line: python -m experiments.generate --workdir=DIR < in > out.

A run of 'translation' translates each line, one of 'causal_lm' writes it and what follows it.
Answers come in the order of the lines, one a line; with --num_return=N, N lines each; with --scores, score<TAB>text.
Every field of DecodeConfig is a flag: --beam_size=4, --sample --temperature=0.7, --no_repeat_ngram_size=3 ...
--weights and --cache run the model quantised, --draft=DIR lets the smaller model of another run draft for it.

On several devices the lines of a batch are spread over them, as the run's mesh has it. Of several processes (flags as
in experiments.train) each reads the same lines, --input=FILE, and the first one writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the project's directory, not experiments/, belongs on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from absl import flags

from experiments import common, processes, search_flags
from experiments.screen import Counter
from transformer_jax.decoding import Draft
from transformer_jax.errors import UserError
from transformer_jax.quantization import quantize
from transformer_jax.training.restore import RestoredRun, load_run
from transformer_jax.training.translate import continue_lines, translate

# How runs of an objective answer lines, and the field of their data which bounds what they read.
ANSWERS = {'translation': (translate, 'source_length'), 'causal_lm': (continue_lines, 'target_length')}

flags.DEFINE_string('workdir', None, 'run directory')
flags.DEFINE_string('input', None, 'file of lines (default: standard input)')
flags.DEFINE_integer('step', None, 'step of the checkpoint (default: the averaged or newest one)')
flags.DEFINE_integer('batch', 64, 'most lines translated at a time')
flags.DEFINE_bool('scores', False, 'put the score and a tab in front of each answer')
flags.DEFINE_string(
    'too_long', 'truncate', "a line longer than the run's sources is cut (truncate) or left empty (skip)"
)
flags.DEFINE_integer('seed', 0, 'of sampling')
flags.DEFINE_string('weights', 'none', 'quantised weights: none, int8, int8_activations or int4')
flags.DEFINE_integer('group', 32, 'numbers which share a scale in --weights=int4')
flags.DEFINE_string('cache', 'none', 'quantised keys and values: none or int8')
flags.DEFINE_string(
    'draft', None, 'run directory of a smaller model with the same vocabulary, which drafts; needs beam_size 1'
)
flags.DEFINE_integer('draft_tokens', 4, 'tokens drafted at a time')


def main() -> int:
    """Reads all lines, answers them in batches by length, writes the answers in order."""
    options = flags.FLAGS
    common.need_workdir()
    if options.batch < 1:
        raise UserError(f'--batch = {options.batch} must be 1 or more')
    output = processes.join(logs=sys.stderr)
    run = load_run(options.workdir, options.step)
    objective = run.experiment.data.objective
    if objective not in ANSWERS:
        raise UserError(f"this run's objective is '{objective}'; lines are answered by runs of {' and '.join(ANSWERS)}")
    write, length = ANSWERS[objective]
    decode = search_flags.changed(run.decode)
    model, params = quantize(run.model, run.params, options.weights, cache=options.cache, group=options.group)
    draft = None if options.draft is None else _draft(options.draft, run, options.draft_tokens)
    lines = _lines(sys.stdin.buffer.read() if options.input is None else _read(options.input))
    counter = Counter(len(lines))
    answers = write(
        model, params, run.tokenizer, lines, decode, longest=getattr(run.experiment.data, length), rows=options.batch,
        too_long=options.too_long, draft=draft, seed=options.seed, progress=counter.add,
    )  # fmt: skip
    counter.close()
    for line_answers in answers:
        for answer in line_answers:
            print(f'{answer.score:.4f}\t{answer.text}' if options.scores else answer.text, file=output)
    return 0


def _draft(workdir: str, run: RestoredRun, tokens: int) -> Draft:
    draft = load_run(workdir)
    words, own = (each.tokenizer.pieces(range(each.tokenizer.vocab_size)) for each in (run, draft))
    if words != own:
        raise UserError(f"the vocabulary of --draft = '{workdir}' is another; train it with this run's tokenizer")
    return Draft(draft.model, draft.params, tokens)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"--input = '{path}' cannot be read: {error.strerror}") from error


def _lines(text: bytes) -> list[str]:
    try:
        lines = text.decode('utf-8').removesuffix('\n').split('\n')
    except UnicodeDecodeError as error:
        raise UserError(f'the input is not UTF-8 at byte {error.start}; convert it') from error
    return [line.removesuffix('\r') for line in lines] if lines != [''] else []


if __name__ == '__main__':
    common.run(main, search_flags.define)
