"""Scaled dot-product attention: one function, several programs for it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax

from transformer_jax.errors import UserError, choose
from transformer_jax.ops import attention_cudnn, attention_splash, attention_xla
from transformer_jax.ops.attention_inputs import Dropout, Inputs
from transformer_jax.ops.masks import Mask

__all__ = ['BACKENDS', 'Dropout', 'attention', 'choose_backend']

_logger = logging.getLogger(__name__)

# From here on `auto` takes the blockwise program: a row of scores then no longer fits a cache.
_BLOCKWISE_FROM = 2048


class Backend(NamedTuple):
    """A program for attention.

    Attributes:
      unsupported: (inputs, platform) -> the feature it lacks, or None.
      suits: (inputs, platform) -> whether `auto` should take it where it is supported.
      attend: (inputs, platform) -> out BTNV.
    """

    unsupported: Callable[[Inputs, str], str | None]
    suits: Callable[[Inputs, str], bool]
    attend: Callable[[Inputs, str], jax.Array]


def _is_long(inputs: Inputs, platform: str) -> bool:
    T, S = inputs.lengths
    return T > 1 and S >= _BLOCKWISE_FROM


# In the order in which `auto` tries them.
BACKENDS = {
    'splash': Backend(
        attention_splash.unsupported,
        lambda inputs, platform: platform == 'tpu' and inputs.lengths[0] > 1,
        attention_splash.attend,
    ),
    'cudnn': Backend(attention_cudnn.unsupported, lambda inputs, platform: platform == 'gpu', attention_cudnn.attend),
    'blockwise': Backend(
        lambda inputs, platform: None, _is_long, lambda inputs, platform: attention_xla.blockwise(inputs)
    ),
    'reference': Backend(
        lambda inputs, platform: None,
        lambda inputs, platform: True,
        lambda inputs, platform: attention_xla.reference(inputs)[0],
    ),
}


def choose_backend(backend: str, inputs: Inputs, platform: str) -> str:
    """Returns the back-end which computes a call: the one named, or for 'auto' the first which supports and suits it.

    Args:
      platform: 'tpu', 'gpu' or 'cpu'.

    Raises:
      UserError: for an unknown name, or for a named one which lacks a feature, naming it.
    """
    choose('attention_backend', backend, ('auto', *BACKENDS))
    if backend != 'auto':
        lacking = BACKENDS[backend].unsupported(inputs, platform)
        if lacking is not None:
            raise UserError(f"attention_backend = '{backend}' does not support {lacking}; choose 'auto'")
        return backend
    reasons = {}
    for name, candidate in BACKENDS.items():
        if not candidate.suits(inputs, platform):
            continue
        lacking = candidate.unsupported(inputs, platform)
        if lacking is None:
            if inputs.lengths[0] > 1:  # one token, as in a step of decoding or when parameters are made, is no choice
                _say(platform, name, '; '.join(f'{other} lacks {why}' for other, why in reasons.items()))
            return name
        reasons[name] = lacking
    raise AssertionError('the reference supports everything')


@functools.cache
def _say(platform: str, name: str, reasons: str) -> None:
    """Logs a choice, once for each."""
    _logger.info('attention on %s runs as %s%s', platform, name, f' ({reasons})' if reasons else '')


def attention(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    mask: Mask,
    *,
    scale: float,
    bias_BNTS: jax.Array | None = None,
    softcap: float | None = None,
    drop: Dropout | None = None,
    backend: str = 'auto',
    return_weights: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns softmax(cap(scale Q K^T) + bias, over the keys the mask shows) V, and the weights if asked for.

    A query which sees no key gets zeros. With K < N key heads, head n uses key head n // (N / K) (grouped-query
    attention, Ainslie et al. 2023; K = 1 is multi-query, Shazeer 2019). cap(x) = softcap tanh(x / softcap).
    Scores and softmax are fp32 whatever the operands are. Vaswani et al. 2017, section 3.2.1.

    Args:
      query_BTNH, key_BSKH, value_BSKH: the value head may have another width than H.
      mask: which key a query sees.
      scale: 1 / sqrt(H) in the paper.
      bias_BNTS: added to the scores; B and T may be 1.
      backend: 'splash' (kernels for TPUs), 'cudnn' (kernels for NVIDIA GPUs), 'blockwise' (scores of 128 queries at a
        time, on each device of its own: O(T) memory, forward and backward), 'reference' (holds all scores), or 'auto':
        the first of them which supports the call and is meant for this platform and size; the choice is logged.
      return_weights: also give the weights BNTS, before dropout; this is the reference's, whatever `backend` says.

    Raises:
      UserError: for an unknown back-end, or for one asked for by name which lacks a feature of the call.
    """
    inputs = Inputs(query_BTNH, key_BSKH, value_BSKH, mask, scale, bias_BNTS, softcap, drop)
    platform = _platform()
    chosen = choose_backend(backend, inputs, platform)
    if return_weights:
        return attention_xla.reference(inputs)
    return BACKENDS[chosen].attend(inputs, platform), None


def _platform() -> str:
    """Returns what the program is traced for: the platform of the mesh if there is one, else JAX's default."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return jax.default_backend() if device is None else device.platform
