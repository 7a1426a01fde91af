"""Exports prefill and step of a run's model as StableHLO: python -m experiments.export --workdir=DIR --output=DIR.

What the folder holds, and a program which runs it with JAX alone, are described in transformer_jax/decoding/export.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the project's directory, not experiments/, belongs on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from absl import flags

from experiments import common
from transformer_jax.decoding.export import export_model
from transformer_jax.errors import UserError
from transformer_jax.huggingface import load_pretrained
from transformer_jax.quantization import quantize
from transformer_jax.training.restore import restore

flags.DEFINE_string('workdir', None, 'run directory')
flags.DEFINE_string('pretrained', None, 'folder of a Hugging Face checkpoint instead')
flags.DEFINE_integer('step', None, 'step of the checkpoint (default: the averaged or newest one)')
flags.DEFINE_string('output', None, 'new folder for the artefacts')
flags.DEFINE_integer('batch', 1, 'rows')
flags.DEFINE_integer('prompt', None, 'tokens of a padded prompt (default: 64, of an encoder-decoder 1)')
flags.DEFINE_integer('source', None, 'tokens of a padded source of an encoder-decoder (default: 64)')
flags.DEFINE_integer('capacity', 128, 'most tokens of prompt and answer together')
flags.DEFINE_list('platforms', ['cpu', 'cuda', 'tpu'], 'where the artefacts can run')
flags.DEFINE_string('weights', 'none', 'quantised weights: none, int8, int8_activations or int4')
flags.DEFINE_integer('group', 32, 'numbers which share a scale in --weights=int4')
flags.DEFINE_string('cache', 'none', 'quantised keys and values: none or int8')


def main() -> int:
    """Writes the folder and prints what is in it."""
    options = flags.FLAGS
    if (options.workdir is None) == (options.pretrained is None):
        raise UserError('give a run directory by --workdir, or a checkpoint by --pretrained')
    if options.output is None:
        raise UserError('--output is missing; name a new folder')
    if options.pretrained is None:
        model, params = restore(options.workdir, options.step)
    else:
        model, params = load_pretrained(options.pretrained)
    model, params = quantize(model, params, options.weights, cache=options.cache, group=options.group)
    translates = model.config.kind == 'encoder_decoder'
    export_model(
        options.output, model, params,
        batch=options.batch, capacity=options.capacity, platforms=options.platforms,
        prompt_length=options.prompt or (1 if translates else 64),
        source_length=options.source or (64 if translates else None),
    )  # fmt: skip
    for path in sorted(Path(options.output).iterdir()):
        print(f'{path.stat().st_size:>12,}  {path}')
    return 0


if __name__ == '__main__':
    common.run(main)
