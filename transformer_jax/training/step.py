"""One optimizer step and one evaluation step as pure, jitted functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from transformer_jax.sharding import DEFAULT_RULES, Rules, mesh_of, tracing_on
from transformer_jax.training.config import TrainingConfig
from transformer_jax.training.expert_bias import balanced, by_parameter
from transformer_jax.training.loss import accuracy, cross_entropy, mean
from transformer_jax.training.optimizer import Schedule
from transformer_jax.training.state import TrainState

Batch = dict[str, Any]
_MAIN = 'loss'


def step_key(seed: jax.typing.ArrayLike, step: jax.typing.ArrayLike, random_bits: str) -> jax.Array:
    """Returns the key of all randomness in one step: fold_in(key(seed), step), the same after a restart."""
    return jax.random.fold_in(jax.random.key(seed, impl=random_bits), step)


def split_rows(batch: Batch, parts: int) -> Batch:
    """Returns the batch with a leading axis of micro-batches: row r goes to micro-batch r mod parts.

    Rows are dealt out in turns, so that each device cuts up its own rows and none of them moves.
    """

    def deal(rows):
        return jnp.moveaxis(rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]), 1, 0)

    return jax.tree.map(deal, batch)


class Gradient(NamedTuple):
    """What a batch says of the parameters.

    Attributes:
      total, weight: sum of the token losses, and of their weights.
      gradient: of the mean loss.
      aux: mean of each auxiliary loss by name, its coefficient included.
      chosen: choices per expert, where the tree of parameters has the correction bias they move; empty without one.
    """

    total: jax.Array
    weight: jax.Array
    gradient: Any
    aux: dict[str, jax.Array]
    chosen: Any


def make_gradient(model: nn.Module, config: TrainingConfig, vocab_size: int | None = None) -> Callable[..., Gradient]:
    """Returns f(params, batch, key) -> `Gradient`.

    Mean loss = sum of token losses / sum of weights over all rows, micro-batches and devices, plus each auxiliary
    loss of the model as its own sum / weight. Sums and gradients of sums are added up; the division comes last.
    """

    def sums(params, batch, key):
        out = model.apply({'params': params}, **batch['inputs'], deterministic=False, rngs={'dropout': key})
        loss, weight = cross_entropy(
            out.logits, batch['labels'], batch['weights'], config.label_smoothing, config.z_loss, vocab_size
        )
        pairs = {_MAIN: (loss, weight), **out.aux}
        chosen = by_parameter(out.expert_choices, model.config) if config.expert_bias == 'balance' else {}
        totals, weights = ({name: pair[place] for name, pair in pairs.items()} for place in (0, 1))
        return totals, jax.lax.stop_gradient((weights, chosen))

    def result(totals, weights, gradient, chosen):
        means = {name: mean(totals[name], weights[name]) for name in totals if name != _MAIN}
        return Gradient(totals[_MAIN], weights[_MAIN], gradient, means, chosen)

    def one(params, batch, key):
        totals, pull, (weights, chosen) = jax.vjp(lambda p: sums(p, batch, key), params, has_aux=True)
        # The weights are known once the forward pass is done, so one pull-back gives the gradient of all means.
        (gradient,) = pull({name: jnp.where(w > 0, 1 / jnp.where(w > 0, w, 1), 0.0) for name, w in weights.items()})
        return result(totals, weights, gradient, chosen)

    def several(params, batch, key):
        def add(carry, part):
            index, micro = part
            totals, pull, (weights, chosen) = jax.vjp(
                lambda p: sums(p, micro, jax.random.fold_in(key, index)), params, has_aux=True
            )
            # One gradient for each kind of loss: their total weights differ and are known only after the last part.
            slopes = {name: pull({other: jnp.float32(other == name) for other in totals})[0] for name in totals}
            return jax.tree.map(jnp.add, carry, (totals, weights, chosen, slopes)), None

        micros = split_rows(batch, config.accumulate)
        shapes = jax.eval_shape(sums, params, jax.tree.map(lambda rows: rows[0], micros), key)
        totals, (weights, chosen) = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        zeros = jax.tree.map(jnp.zeros_like, params)
        start = (totals, weights, chosen, {name: zeros for name in totals})
        (totals, weights, chosen, slopes), _ = jax.lax.scan(add, start, (jnp.arange(config.accumulate), micros))
        means = [jax.tree.map(lambda slope, name=name: mean(slope, weights[name]), slopes[name]) for name in slopes]
        return result(totals, weights, jax.tree.map(lambda *parts: sum(parts), *means), chosen)

    return one if config.accumulate == 1 else several


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: TrainingConfig,
    shardings: TrainState | None = None,
    rules: Rules = DEFAULT_RULES,
    vocab_size: int | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns a jitted step(state, batch, seed) -> (state, metrics); the state is donated, metrics stay on the device.

    `seed` is that of the config unless it is given; given as an array, runs of other seeds share the compiled program.

    Metrics: loss (smoothed mean, nats), weight (target tokens), each auxiliary loss by its name, rate, gradient_norm
    (before clipping), skipped and skipped_in_row. With `expert_bias` 'balance' the correction biases of a mixture are
    moved by the load of the batch, see `training.expert_bias`.

    When loss or gradient is not finite, parameters, moments and averages stay as they were and only `step` and the two
    counters move.
    """
    gradient_of = make_gradient(model, config, vocab_size)

    def step(state: TrainState, batch: Batch, seed: jax.typing.ArrayLike = config.seed):
        key = step_key(seed, state.step, config.random_bits)
        with tracing_on(mesh_of(shardings), rules):
            found = gradient_of(state.params, batch, key)
        loss, norm = mean(found.total, found.weight), optax.tree.norm(found.gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(found.gradient, state.opt_state, state.params)
        updates = balanced(updates, found.chosen, config.expert_bias_rate)
        params = optax.apply_updates(state.params, updates)
        update = state.step - state.skipped + 1
        ema = state.ema
        if ema is not None:
            # The young average forgets its start: decay (1 + n) / (10 + n) until that exceeds the configured one.
            decay = jnp.minimum(config.ema_decay, (1 + update) / (10 + update))
            ema = jax.tree.map(lambda old, now: decay * old + (1 - decay) * now, ema, params)
        params, opt_state, ema = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state, ema),
            (state.params, state.opt_state, state.ema),
        )
        skipped = state.skipped + jnp.where(finite, 0, 1)
        in_row = jnp.where(finite, 0, state.skipped_in_row + 1)
        metrics = {
            'loss': loss,
            'weight': found.weight,
            **found.aux,
            'rate': schedule(update),
            'gradient_norm': norm,
            'skipped': skipped,
            'skipped_in_row': in_row,
        }
        new = TrainState(
            step=state.step + 1, params=params, opt_state=opt_state, ema=ema, skipped=skipped, skipped_in_row=in_row
        )
        return new, metrics

    return jax.jit(step, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))


def make_eval_step(
    model: nn.Module, mesh: Mesh | None = None, rules: Rules = DEFAULT_RULES
) -> Callable[[Any, Batch], dict[str, tuple[jax.Array, jax.Array]]]:
    """Returns a jitted step(params, batch) -> {'loss', 'accuracy'} as (sum, weight); loss is unsmoothed, in nats."""

    def step(params: Any, batch: Batch):
        with tracing_on(mesh, rules):
            logits = model.apply({'params': params}, **batch['inputs']).logits
        return {
            'loss': cross_entropy(logits, batch['labels'], batch['weights']),
            'accuracy': accuracy(logits, batch['labels'], batch['weights']),
        }

    return jax.jit(step)
