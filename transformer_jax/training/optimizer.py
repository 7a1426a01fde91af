"""Learning-rate schedules and the optimizer, with decay on matrices only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from transformer_jax.training.config import OptimizerConfig
from transformer_jax.training.quantized_adam import scale_by_quantized_adam

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]

# Axes which stack the parameters of several layers in one array.
STACK_AXES = ('layers',)


def make_schedule(config: OptimizerConfig, d_model: int, steps: int) -> Schedule:
    """Returns rate(n), the rate of update n = 1, 2, ... ("Attention Is All You Need", equation 3).

    noam: factor D^-0.5 min(n^-0.5, n W^-1.5). Others rise as n / W for W warm-up updates, so that update 1 already
    moves and update W has the peak rate; then cosine and linear fall to `final_fraction` of it at update `steps`,
    and constant stays.
    """
    peak, warmup = config.learning_rate, config.warmup_steps

    def rate(update: jax.typing.ArrayLike) -> jax.Array:
        n = jnp.asarray(update, jnp.float32)
        if config.schedule == 'noam':
            return peak * d_model**-0.5 * jnp.minimum(n**-0.5, n * warmup**-1.5)
        rise = jnp.minimum(n / warmup, 1.0) if warmup else 1.0
        done = jnp.clip((n - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        fall = {'cosine': 0.5 * (1 + jnp.cos(math.pi * done)), 'linear': 1 - done, 'constant': 1.0}[config.schedule]
        if config.schedule != 'constant':
            fall = config.final_fraction + (1 - config.final_fraction) * fall
        return peak * rise * fall

    return rate


def decay_mask(params: Any, axes: Any = None) -> Any:
    """Returns a tree of booleans: True where weight decay applies, on matrices and embeddings.

    A parameter is spared when it is a vector once stacking axes are left out, when its own name says bias or scale,
    or when it lies in a module named as a norm. `axes` is the tree of logical axis names; a stacked norm parameter
    is two-dimensional, so without `axes` only names tell it from a matrix.
    """

    def decays(path, leaf, names) -> bool:
        parts = [str(getattr(key, 'key', getattr(key, 'name', key))).lower() for key in path]
        norm = any('norm' in part or re.fullmatch(r'ln(_?\w+)?', part) for part in parts)
        own = parts[-1] if parts else ''
        rank = len(leaf.shape) - sum(name in STACK_AXES for name in names)
        return rank >= 2 and not norm and own not in ('scale', 'b') and 'bias' not in own

    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    if axes is None:
        names = [()] * len(paths)
    else:
        names = structure.flatten_up_to(axes)
    return structure.unflatten([decays(path, leaf, entry) for (path, leaf), entry in zip(paths, names, strict=True)])


def make_optimizer(config: OptimizerConfig, schedule: Schedule, axes: Any = None) -> optax.GradientTransformation:
    """Returns clip -> Adam or Adafactor -> decoupled decay -> minus the rate of this update.

    optax counts updates from 0 and the schedule from 1, so update 1 has schedule(1). Gradients of several
    micro-batches are summed in the train step, so one call here is one update.
    """
    parts = []
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    if config.name == 'adafactor':
        parts += [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()]
    elif config.moments == 'int8':
        parts.append(scale_by_quantized_adam(config.b1, config.b2, config.eps, axes))
    else:
        parts.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    if config.name == 'adamw':
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=lambda params: decay_mask(params, axes)))
    parts.append(optax.scale_by_learning_rate(lambda count: schedule(count + 1)))
    optimizer = optax.chain(*parts)
    return optimizer if config.master == 'none' else with_master_copies(optimizer)


class MasterState(NamedTuple):
    """fp32 copies of the parameters, and the state of the optimizer which moves them."""

    copies: Any
    inner: optax.OptState


def with_master_copies(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer on fp32 copies, of which the parameters are the rounding (Micikevicius et al. 2018, 3.1).

    An update which the parameters' type cannot show is kept in the copy, and shows once it has added up.
    """

    def init(params):
        # Arrays of their own: the train step donates its state, and one buffer cannot be donated twice.
        copies = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        return MasterState(copies, optimizer.init(copies))

    def update(gradients, state, params):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), gradients)
        updates, inner = optimizer.update(wide, state.inner, state.copies)
        copies = optax.apply_updates(state.copies, updates)
        # Added in fp32 and rounded by apply_updates, these differences make the parameters the rounded copies.
        differences = jax.tree.map(lambda copy, x: copy - x.astype(jnp.float32), copies, params)
        return differences, MasterState(copies, inner)

    return optax.GradientTransformation(init, update)
