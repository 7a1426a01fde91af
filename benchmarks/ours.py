"""Our contestant: the library's own train step, called as a run calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np

import transformer_jax
from benchmarks.shapes import Shapes, make_batches
from transformer_jax.models import abstract_params, init_params
from transformer_jax.models.parameters import count_params
from transformer_jax.training.config import OptimizerConfig, TrainingConfig
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.state import init_state
from transformer_jax.training.step import make_train_step


def make_training(config: transformer_jax.ModelConfig, learning_rate: float) -> tuple[Callable, Callable]:
    """Returns the jitted train step and `make_state(key)`; Adam at a constant rate, no label smoothing, no clipping."""
    model = transformer_jax.build(config)
    optimizer_config = OptimizerConfig(learning_rate=learning_rate, schedule='constant', warmup_steps=0)
    training_config = TrainingConfig(label_smoothing=0.0)
    schedule = make_schedule(optimizer_config, config.d_model, training_config.steps)
    optimizer = make_optimizer(optimizer_config, schedule, abstract_params(model)[1])
    make_state = functools.partial(init_state, functools.partial(init_params, model), optimizer)
    return make_train_step(model, optimizer, schedule, training_config), make_state


def make_config(shapes: Shapes, precision: str, dropout: float, layer_stack: str) -> transformer_jax.ModelConfig:
    """Returns the paper's encoder-decoder in these dimensions."""
    return transformer_jax.preset(
        'transformer_base',
        vocab_size=shapes.vocab_size,
        d_model=shapes.d_model,
        d_ff=shapes.d_ff,
        num_layers=shapes.num_layers,
        num_heads=shapes.num_heads,
        dropout=dropout,
        dtype=precision,
        layer_stack=layer_stack,
    )


def to_training_batch(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns a batch as the data pipeline would give it: masks of ones, every label counted."""
    return {
        'inputs': {
            'source_tokens': batch['source'],
            'target_tokens': batch['target'],
            'source_mask': np.ones_like(batch['source']),
            'target_mask': np.ones_like(batch['target']),
        },
        'labels': batch['labels'],
        'weights': np.ones(batch['labels'].shape, np.float32),
    }


def make_step(precision: str, dropout: float, shapes: Shapes, layer_stack: str) -> tuple[Callable, dict]:
    """Returns `run_step(i) -> loss` and facts, as `peers_torch.make_step` does."""
    config = make_config(shapes, precision, dropout, layer_stack)
    train_step, make_state = make_training(config, shapes.learning_rate)
    state = make_state(jax.random.key(0))
    parameters = count_params(state.params)
    batches = [to_training_batch(batch) for batch in make_batches(shapes)]

    def run_step(step: int) -> float:
        nonlocal state
        state, metrics = train_step(state, batches[step % len(batches)])
        jax.block_until_ready(state)
        return float(metrics['loss'])

    versions = {'jax': jax.__version__, 'flax': flax.__version__}
    return run_step, {'parameters': parameters, 'versions': versions}
