"""One small model, one batch and one train step, on any mesh: what the tests of parallelism compare."""

from __future__ import annotations

import re

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.config import ModelConfig
from transformer_jax.models import abstract_params, build
from transformer_jax.sharding import make_mesh, place_batch, resolve
from transformer_jax.subconfigs import MixtureConfig
from transformer_jax.training.config import OptimizerConfig, TrainingConfig
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.state import abstract_state, init_state, state_shardings, with_shardings
from transformer_jax.training.step import make_train_step

ROWS, SOURCE, TARGET, VOCABULARY = 16, 8, 12, 24
CONFIG = ModelConfig(
    vocab_size=VOCABULARY, d_model=16, d_ff=24, num_layers=1, num_heads=4, num_kv_heads=2,
    norm='rms', norm_position='pre', position='rope', ffn='gated_silu', ffn_bias=False, dropout=0.1,
    attention_dropout=0.1, ffn_dropout=0.1, layer_stack='unrolled',
)  # fmt: skip
EXPERTS = CONFIG.replace(mixture=MixtureConfig(4, 2, d_ff=8, shared_experts=1, balance_loss=0.1, z_loss=0.01))
TRAINING = TrainingConfig(accumulate=2, steps=10)
# With an epsilon far above rounding, an update is as smooth in the gradient as the gradient is itself.
OPTIMIZER = OptimizerConfig('adamw', 0.01, 'constant', 0, eps=1e-2, weight_decay=0.1, clip_norm=0.5)


def packed_batch(rows=ROWS, seed=0):
    """Rows of two or three packed pairs and padding, of unequal numbers of labels; one row has none at all."""
    random = np.random.default_rng(seed)

    def segments(length):
        cuts = np.sort(random.integers(1, length, (rows, 3)), axis=1)
        position = np.arange(length)[None]
        ids = 1 + (position >= cuts[:, :1]) + (position >= cuts[:, 1:2])
        return np.where(position < cuts[:, 2:], ids, 0).astype(np.int32)

    source, target = segments(SOURCE), segments(TARGET)
    target[3] = 0

    def tokens(ids):
        return np.where(ids > 0, random.integers(1, VOCABULARY, ids.shape), 0).astype(np.int32)

    return {
        'inputs': {
            'source_tokens': tokens(source),
            'target_tokens': tokens(target),
            'source_segment_ids': source,
            'target_segment_ids': target,
        },
        'labels': tokens(target),
        'weights': (target > 0).astype(np.float32),
    }


class Parallel:
    """A model's train step on a mesh: the state after `steps` steps, the losses, and the compiled program's text."""

    def __init__(self, config, mesh_config, devices=None, steps=2):
        self.mesh = make_mesh(mesh_config, devices)
        model = build(config)
        params, self.axes = abstract_params(model)
        schedule = make_schedule(OPTIMIZER, config.d_model, TRAINING.steps)
        optimizer = make_optimizer(OPTIMIZER, schedule, self.axes)
        abstract = abstract_state(params, optimizer)
        shardings = state_shardings(
            abstract, resolve(params, self.axes, self.mesh), NamedSharding(self.mesh, PartitionSpec())
        )
        self.start = random_params(params)
        state = init_state(lambda key: self.start, optimizer, jax.random.key(0), shardings=shardings)
        self.bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        step = make_train_step(model, optimizer, schedule, TRAINING, shardings)
        batches = [place_batch(packed_batch(seed=seed), self.mesh) for seed in range(steps)]
        program = step.lower(with_shardings(abstract, shardings), batches[0]).compile()
        self.text = program.as_text()
        self.losses, self.gradients = [], None
        for batch in batches:
            state, metrics = program(state, batch)
            self.losses.append(float(metrics['loss']))
            if self.gradients is None:
                # After one step Adam's first moment is (1 - b1) times the gradient, clipped.
                self.gradients = jax.device_get(_adam(state.opt_state).mu)
                self.norm = float(metrics['gradient_norm'])
        self.state = state
        self.params = jax.device_get(state.params)

    def moments(self):
        """Adam's two moments."""
        adam = _adam(self.state.opt_state)
        return adam.mu, adam.nu


def random_params(shapes):
    """Parameters like trained ones, the same on every mesh."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: (0.4 * random.normal(size=leaf.shape)).astype(leaf.dtype), shapes)


def _adam(opt_state):
    return next(part for part in opt_state if hasattr(part, 'mu'))


def collectives(text):
    """Returns {kind: count} of the collective operations in a compiled program."""
    kinds = re.findall(r' (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(', text)
    return {kind: kinds.count(kind) for kind in set(kinds)}
