"""Log-probabilities of given targets, by the model's training forward."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.generate import resolve
from transformer_jax.decoding.inputs import bucket, check_ids, real_rows
from transformer_jax.errors import UserError


def score(
    model: nn.Module,
    params: Any,
    tokens: Any,
    targets: Any,
    *,
    mask: Any = None,
    target_mask: Any = None,
    config: DecodeConfig | None = None,
) -> np.ndarray:
    """Returns log p(targets[b, t] | tokens[b], targets[b, :t]), (B, T), 0 where `target_mask` is 0.

    The sum of a row is the log-probability of its target, end token included if the target holds one. Nothing is
    processed: penalties, bans and temperature of `config` do not count. Lengths are rounded up as in `generate`.

    Args:
      model: an encoder-decoder or a decoder.
      params: its parameters.
      tokens: (B, S) source of an encoder-decoder, or prompt of a decoder.
      targets: (B, T) ids which follow.
      mask: (B, S), 1 for real tokens; None where all are.
      target_mask: (B, T) likewise; padding may stand on either side.
      config: for `decoder_start_id` and `prefix_tokens`; None as in `generate`.

    Raises:
      UserError: on ids outside the vocabulary, different batch sizes, or lengths beyond the model's positions.
    """
    config = resolve(model, config)
    check_ids(config, model.config)
    encoder_decoder = model.config.kind == 'encoder_decoder'
    given = real_rows(tokens, mask, model.config, 'the source' if encoder_decoder else 'the prompt')
    wanted = real_rows(targets, target_mask, model.config, 'the targets')
    if len(given) != len(wanted):
        raise UserError(f'{len(given)} rows of tokens and {len(wanted)} rows of targets; give one target for each row')
    prefix = np.array(config.prefix_tokens, np.int32)
    starts = [np.array([config.decoder_start_id])] * len(given) if encoder_decoder else given
    prompts = [np.concatenate([row, prefix]) for row in starts]
    for number, row in enumerate(prompts):
        if not len(row):
            raise UserError(f'row {number} of the prompt has no token; a decoder begins with at least one')
    inputs = [np.concatenate([prompt, target])[:-1] for prompt, target in zip(prompts, wanted, strict=True)]
    width = _width(inputs, model)
    labels = np.zeros((len(inputs), width), np.int32)
    real = np.zeros(labels.shape, bool)
    for row, (prompt, target) in enumerate(zip(prompts, wanted, strict=True)):
        labels[row, len(prompt) - 1 : len(prompt) - 1 + len(target)] = target
        real[row, len(prompt) - 1 : len(prompt) - 1 + len(target)] = True
    arguments = _padded(inputs, width)
    if encoder_decoder:
        source = _padded(given, _width(given, model))
        arguments = {
            'source_tokens': source['tokens'],
            'source_mask': source['mask'],
            'target_tokens': arguments['tokens'],
            'target_mask': arguments['mask'],
        }
    log_probs = np.asarray(_label_log_probs(params, arguments, labels, model=model))
    result = np.zeros(np.shape(targets), np.float32)
    result[np.ones(result.shape, bool) if target_mask is None else np.asarray(target_mask).astype(bool)] = log_probs[
        real
    ]
    return result


@functools.partial(jax.jit, static_argnames=('model',))
def _label_log_probs(
    params: Any, arguments: dict[str, jax.Array], labels_BT: jax.Array, *, model: nn.Module
) -> jax.Array:
    logits = model.apply({'params': params}, **arguments).logits
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), labels_BT[..., None], axis=-1)[..., 0]


def _width(rows: list[np.ndarray], model: nn.Module) -> int:
    longest, positions = max(len(row) for row in rows), model.config.max_positions
    if positions is not None and longest > positions:
        raise UserError(f'a sequence of {longest} tokens is longer than the {positions} positions of the model')
    return bucket(longest) if positions is None else min(bucket(longest), positions)


def _padded(rows: list[np.ndarray], width: int) -> dict[str, np.ndarray]:
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)], mask[number, : len(row)] = row, True
    return {'tokens': tokens, 'mask': mask}
