"""Learning-rate schedules and the optimizer, with decay on matrices only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_jax.training.config import OptimizerConfig

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
    """Returns clip -> Adam -> decoupled decay -> minus the rate of this update.

    optax counts updates from 0 and the schedule from 1, so update 1 has schedule(1). Gradients of several
    micro-batches are summed in the train step, so one call here is one update.
    """
    parts = []
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    parts.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    if config.name == 'adamw':
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=lambda params: decay_mask(params, axes)))
    parts.append(optax.scale_by_learning_rate(lambda count: schedule(count + 1)))
    return optax.chain(*parts)
