"""Sweeps small enough for tests, and run directories as finished runs leave them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.sweeps import Sweep, plan, variants
from transformer_jax.sweeps.cost import Cost
from transformer_jax.sweeps.plan import describe, write_sweep
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig

WORDS = 'open close save print delete the a file page cell row table dialog of in'.split()


def write_pairs(path: Path, count: int) -> str:
    """Writes sentence pairs: the target is the source backwards."""
    rows = [[WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(2 + i % 5)] for i in range(count)]
    path.write_text(''.join(f'{" ".join(row)}\t{" ".join(row[::-1])}\n' for row in rows))
    return str(path)


def tiny_base(folder: Path, **training) -> Experiment:
    """An encoder-decoder of one layer, trained for four steps."""
    return Experiment(
        name='tiny',
        model=ModelConfig(vocab_size=290, d_model=16, d_ff=32, num_layers=1, num_heads=2, layer_stack='unrolled'),
        data=DataConfig(
            train=write_pairs(folder / 'train.tsv', 32), valid=write_pairs(folder / 'valid.tsv', 8), test='none',
            vocab_size=290, source_length=24, target_length=24, batch_tokens=384, evaluation_rows=8,
        ),
        optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=4),
        training=TrainingConfig(**{
            'steps': 4, 'log_every': 1, 'evaluate_every': 2, 'checkpoint_every': 2, 'keep': 2, **training,
        }),
        decode=DecodeConfig(max_new_tokens=4, beam_size=2),
    )  # fmt: skip


def sweep_of(*names: str, **fields) -> Sweep:
    """Returns a sweep whose arms differ in dropout."""
    points = variants({name: {'model.dropout': 0.01 * index} for index, name in enumerate(names)})
    return Sweep(**{'name': 'arms', 'title': 'Arms', 'points': points, 'baseline': names[0], **fields})


def fake_sweep(workdir: Path, base: Experiment, sweep: Sweep, found: dict) -> None:
    """Writes a sweep whose runs ended: `found[variant][seed]` is (perplexity, BLEU, translations), a status or None."""
    costs = {point.name: Cost(1000, 100, 50, 10_000) for point in sweep.points}
    write_sweep(workdir, describe(sweep, base), costs, ['Data order: the same.'])
    for run in plan(sweep, base, workdir):
        what = found[run.variant][run.seed]
        if what is None:
            continue
        run.directory.mkdir(parents=True)
        (run.directory / 'config.json').write_text(json.dumps(run.experiment.to_dict()))
        if isinstance(what, str):
            failure = {'status': what, 'step': 3, 'message': 'NotFinite: loss'}
            (run.directory / 'failure.json').write_text(json.dumps(failure))
            continue
        perplexity, bleu, translations = what
        valid = {'loss': 1.0, 'perplexity': perplexity, 'bleu': bleu}
        (run.directory / 'result.json').write_text(json.dumps({'step': 4, 'valid': valid, 'devices': '1 abacus'}))
        (run.directory / 'translations_valid.txt').write_text(''.join(line + '\n' for line in translations))
        lines = [{'step': step, 'valid/loss': 5.0 / step + 0.01 * run.seed} for step in (2, 4)]
        lines.append({'step': 4, 'train/seconds_per_step': 0.25})
        (run.directory / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


def change(experiment: Experiment, group: str, **fields) -> Experiment:
    """Returns the experiment with fields of one group changed."""
    return dataclasses.replace(experiment, **{group: dataclasses.replace(getattr(experiment, group), **fields)})
