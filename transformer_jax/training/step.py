"""One optimizer step and one evaluation step as pure, jitted functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from transformer_jax.training.config import TrainingConfig
from transformer_jax.training.loss import accuracy, cross_entropy, mean
from transformer_jax.training.optimizer import Schedule
from transformer_jax.training.state import TrainState

Batch = dict[str, Any]


def step_key(seed: int, step: jax.typing.ArrayLike, random_bits: str) -> jax.Array:
    """Returns the key of all randomness in one step: fold_in(key(seed), step), the same after a restart."""
    return jax.random.fold_in(jax.random.key(seed, impl=random_bits), step)


def split_rows(batch: Batch, parts: int) -> Batch:
    """Returns the batch with a leading axis of micro-batches: row r goes to micro-batch r mod parts.

    Rows are dealt out in turns, so that each device cuts up its own rows and none of them moves.
    """

    def deal(rows):
        return jnp.moveaxis(rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]), 1, 0)

    return jax.tree.map(deal, batch)


def make_gradient(model: nn.Module, config: TrainingConfig) -> Callable[..., tuple[jax.Array, jax.Array, Any]]:
    """Returns f(params, batch, key) -> (loss sum, weight, gradient of the mean loss).

    Mean loss = sum of token losses / sum of weights over all rows, micro-batches and devices, plus each auxiliary
    loss of the model as its own sum / weight. Sums and gradients of sums are added up; the division comes last.
    """

    def sums(params, batch, key):
        out = model.apply({'params': params}, **batch['inputs'], deterministic=False, rngs={'dropout': key})
        loss, weight = cross_entropy(
            out.logits, batch['labels'], batch['weights'], config.label_smoothing, config.z_loss
        )
        pairs = [(loss, weight)] + [out.aux[name] for name in sorted(out.aux)]
        return jnp.stack([total for total, _ in pairs]), jax.lax.stop_gradient(jnp.stack([w for _, w in pairs]))

    def one(params, batch, key):
        totals, pull, weights = jax.vjp(lambda p: sums(p, batch, key), params, has_aux=True)
        # The weights are known once the forward pass is done, so one pull-back gives the gradient of all means.
        (gradient,) = pull(jnp.where(weights > 0, 1 / jnp.where(weights > 0, weights, 1), 0.0))
        return totals[0], weights[0], gradient

    def several(params, batch, key):
        def add(carry, part):
            index, micro = part
            totals, pull, weights = jax.vjp(
                lambda p: sums(p, micro, jax.random.fold_in(key, index)), params, has_aux=True
            )
            # One gradient for each kind of loss: their total weights differ and are known only after the last part.
            slopes = [pull(row)[0] for row in jnp.eye(totals.shape[0])]
            return jax.tree.map(jnp.add, carry, (totals, weights, slopes)), None

        micros = split_rows(batch, config.accumulate)
        kinds = jax.eval_shape(sums, params, jax.tree.map(lambda rows: rows[0], micros), key)[0].shape[0]
        zeros = jax.tree.map(jnp.zeros_like, params)
        start = (jnp.zeros(kinds), jnp.zeros(kinds), [zeros] * kinds)
        (totals, weights, slopes), _ = jax.lax.scan(add, start, (jnp.arange(config.accumulate), micros))
        gradient = jax.tree.map(lambda *parts: sum(mean(part, weights[k]) for k, part in enumerate(parts)), *slopes)
        return totals[0], weights[0], gradient

    return one if config.accumulate == 1 else several


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: TrainingConfig,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns a jitted step(state, batch) -> (state, metrics); the state is donated, metrics stay on the device.

    Metrics: loss (smoothed mean, nats), weight (target tokens), rate, gradient_norm (before clipping), skipped and
    skipped_in_row. When loss or gradient is not finite, parameters, moments and averages stay as they were and only
    `step` and the two counters move.
    """
    gradient_of = make_gradient(model, config)

    def step(state: TrainState, batch: Batch):
        key = step_key(config.seed, state.step, config.random_bits)
        total, weight, gradient = gradient_of(state.params, batch, key)
        loss, norm = mean(total, weight), optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
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
            'weight': weight,
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


def make_eval_step(model: nn.Module) -> Callable[[Any, Batch], dict[str, tuple[jax.Array, jax.Array]]]:
    """Returns a jitted step(params, batch) -> {'loss', 'accuracy'} as (sum, weight); loss is unsmoothed, in nats."""

    def step(params: Any, batch: Batch):
        logits = model.apply({'params': params}, **batch['inputs']).logits
        return {
            'loss': cross_entropy(logits, batch['labels'], batch['weights']),
            'accuracy': accuracy(logits, batch['labels'], batch['weights']),
        }

    return jax.jit(step)
