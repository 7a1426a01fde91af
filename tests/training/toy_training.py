"""Models, batches and runs small enough that a training claim is checked in a second."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig

VOCAB = 11


class Output(NamedTuple):
    logits: Any
    aux: dict


class Toy(nn.Module):
    """Embedding, one dense layer with dropout, a norm, and logits; optionally an auxiliary loss."""

    dropout: float = 0.0
    with_aux: bool = False

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        x_BTD = nn.Embed(VOCAB, 8, name='embedding')(tokens)
        x_BTD = nn.Dense(8, name='hidden')(x_BTD)
        x_BTD = nn.Dropout(self.dropout)(nn.tanh(x_BTD), deterministic=deterministic)
        logits = nn.Dense(VOCAB, name='output')(nn.LayerNorm(name='final_norm')(x_BTD))
        counted = jnp.sum((tokens > 2).astype(jnp.float32))
        aux = {'balance': (0.1 * jnp.sum(x_BTD**2 * (tokens > 2)[..., None]), counted)} if self.with_aux else {}
        return Output(logits, aux)


def batch(rows=8, length=6, seed=0):
    """Random tokens whose rows have unequal counts of real labels."""
    random = np.random.default_rng(seed)
    weights = (np.arange(length) < random.integers(1, length + 1, (rows, 1))).astype(np.float32)
    return {
        'inputs': {'tokens': random.integers(1, VOCAB, (rows, length)).astype(np.int32)},
        'labels': random.integers(0, VOCAB, (rows, length)).astype(np.int32),
        'weights': weights,
    }


WORDS = 'open close save print delete the a file page cell row table dialog of in'.split()


def write_pairs(path: Path, count=48, seed=0):
    """Writes sentence pairs as TSV: the target is the source backwards."""
    random = np.random.default_rng(seed)
    rows = [list(random.choice(WORDS, random.integers(2, 8))) for _ in range(count)]
    path.write_text(''.join(f'{" ".join(row)}\t{" ".join(row[::-1])}\n' for row in rows))
    return str(path)


def tiny_experiment(directory: Path, *, data=None, optimizer=None, model=None, **training):
    """An encoder-decoder of one layer on generated pairs, with dropout, without validation or test."""
    directory.mkdir(exist_ok=True)
    fields = {'steps': 6, 'log_every': 1, 'evaluate_every': 1000, 'checkpoint_every': 2, **training}
    return Experiment(
        name='tiny',
        model=ModelConfig(vocab_size=290, d_model=16, d_ff=32, num_layers=1, num_heads=2, **(model or {})),
        data=DataConfig(
            train=write_pairs(directory / 'train.tsv'), valid='none', test='none', vocab_size=290, source_length=16,
            target_length=16, batch_tokens=512, row_multiple=16, evaluation_rows=8,
        ).replace(**(data or {})),
        optimizer=optimizer or OptimizerConfig(learning_rate=1.0, warmup_steps=4),
        training=TrainingConfig(**fields),
        decode=DecodeConfig(max_new_tokens=4),
    )  # fmt: skip


def change(experiment: Experiment, group: str, **fields):
    """Returns the experiment with fields of one group changed."""
    return dataclasses.replace(experiment, **{group: dataclasses.replace(getattr(experiment, group), **fields)})
