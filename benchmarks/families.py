"""Writes docs/families.md: every family of checkpoints, the choices it is made of, and the parity which is measured.

    python -m benchmarks.families            # measures every case of `benchmarks.parity`, a few minutes on a CPU
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from benchmarks.parity import BAR, CASES, RELATIVE_BAR, Difference, measure, round_trip
from transformer_jax.config import ModelConfig

TARGET = Path(__file__).parents[1] / 'docs' / 'families.md'

# Sizes and ways to run, which say nothing of an architecture.
_SIZES = frozenset(
    """kind vocab_size d_model d_ff num_layers num_decoder_layers num_heads num_kv_heads d_k d_v dropout
    attention_dropout ffn_dropout initializer initializer_stddev dtype param_dtype layer_stack remat
    attention_backend cache_dtype decode max_positions trained_positions num_classes norm_epsilon window rope_theta
    rope_local_theta relative_buckets relative_max_distance""".split()
)


def choices(config: ModelConfig) -> str:
    """Returns the choices of an architecture which differ from the defaults."""
    default = ModelConfig()
    said = []
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        if field.name in _SIZES or value == getattr(default, field.name) or value is None:
            continue
        if field.name == 'rope_scaling':
            value = value.kind
        if dataclasses.is_dataclass(value):
            own = [f.name for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
            value = '(' + ', '.join(f'{name} {getattr(value, name)}' for name in own) + ')'
        if isinstance(value, tuple):
            value = ' '.join(value)
        said.append(f'{field.name} {value:.3g}' if isinstance(value, float) else f'{field.name} {value}')
    return f'{config.kind}; ' + ', '.join(said)


def row(case, difference: Difference, returned: float, config: ModelConfig) -> str:
    """Returns a line of the table."""
    d = difference
    errors = (d.logits, d.hidden, d.attention, d.loss, d.gradient, returned)
    bare = config.head == 'none'
    cells = ' | '.join('-' if bare and i in (0, 3, 4) else f'{error:.1e}' for i, error in enumerate(errors))
    return f'| {case.name} | {case.architecture} | {cells} | {choices(config)} |'


def main():
    """Measures and writes."""
    lines = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            difference, theirs, model, params, inputs = measure(case.name, Path(folder))
            returned = round_trip(case, theirs, model, params, inputs, Path(folder) / 'back')
            lines.append(row(case, difference, returned, model.config))
            print(lines[-1], flush=True)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(HEADER + '\n'.join(lines) + '\n', encoding='utf-8')


HEADER = f"""# Families of Hugging Face checkpoints

Written by `python -m benchmarks.families`; do not edit. Each row is a tiny random model (every number random, norms
and biases too) made by transformers, read by `load_pretrained` and run both ways in fp32 on a CPU, with padding.

- logits, hidden states, attentions: largest difference over real tokens, as a fraction of max(1, largest value); at
  most {BAR:.0e} is allowed.
- loss, gradients: relative difference of the loss and, the worst of all parameters, of a gradient's norm; at most
  {RELATIVE_BAR:.0e}.
- back: difference of transformers' own last hidden state before and after our `save_pretrained`; reading the export
  again gives the same bits.

| case | architecture | logits | hidden states | attentions | loss | gradients | back | choices |
|---|---|---|---|---|---|---|---|---|
"""

if __name__ == '__main__':
    main()
