"""What a program has to compute and to communicate, whatever the compiler makes of it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from transformer_jax.config import ModelConfig

# Matrix products of one attention layer, of which the forward pass has scores and outputs.
FORWARD_PRODUCTS = 2


class Lengths(NamedTuple):
    """Queries and keys (T, S) of each kind of attention in one call; None where there is none of it.

    The last query stands at the last key, so that a mask shows the pairs which a prompt, or a step after it, sees.
    """

    encoder: tuple[int, int] | None = None
    decoder: tuple[int, int] | None = None
    cross: tuple[int, int] | None = None


def attention_flops(config: ModelConfig, rows: int, lengths: Lengths, visible: bool) -> int:
    """Returns the FLOPs of QK^T and its product with V in one forward pass, 2 B N (H + V) for each pair.

    Args:
      visible: count only the pairs which causality and windows show, as kernels compute them; else all.
    """

    def pairs(stack, T, S):
        kinds = [config.layer_pattern[i % len(config.layer_pattern)] for i in range(config.depth(stack))]
        windows = [config.window if kind == 'local' else None for kind in kinds]
        return sum(_pairs(T, S, stack == 'decoder', window) if visible else T * S for window in windows)

    total = sum(pairs(stack, *getattr(lengths, stack)) for stack in ('encoder', 'decoder') if getattr(lengths, stack))
    if lengths.cross is not None:
        total += config.depth('decoder') * math.prod(lengths.cross)
    return FORWARD_PRODUCTS * rows * config.num_heads * (config.key_dim + config.value_dim) * total


def attention_layers(config: ModelConfig) -> int:
    """Returns how many attention layers the model has, cross-attention included."""
    if config.kind == 'encoder_decoder':
        return config.depth('encoder') + 2 * config.depth('decoder')
    return config.num_layers


def _pairs(T: int, S: int, causal: bool, window: int | None) -> int:
    reach = S if window is None else window - 1
    places = range(S - T, S)
    return sum(min(i + (0 if causal else reach), S - 1) - max(i - reach, 0) + 1 for i in places)


def least_bytes(
    config: ModelConfig, params: Any, shardings: Any, mesh: Mesh, rows: int, lengths: tuple[int, ...], training: bool
) -> dict[str, float]:
    """Returns the bytes which a chip must send in one step for this sharding, by what they are, as rings send them.

    'parameters': what fsdp splits is gathered in the compute dtype for the forward pass, and again for the backward
    pass (FSDP: Zhao et al. 2023, section 3.1; ZeRO-3: Rajbhandari et al. 2020, section 7.2.2). 'gradients': reduced and
    scattered over fsdp once, in their own type, and summed over the copies which data parallelism keeps.
    'activations': tensor parallelism sums two partial results a layer and direction (Shoeybi et al. 2019, section 3);
    a sequence axis gathers keys and values and sums their gradients. Those of experts depend on the routing, and are
    not in it.

    Args:
      lengths: of the token streams.
    """
    width = _width(config.dtype)
    totals = dict(parameters=0.0, gradients=0.0, activations=0.0)
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    for leaf, sharding in leaves:
        fsdp = _along(sharding, 'fsdp')
        here = math.prod(sharding.shard_shape(leaf.shape))
        totals['parameters'] += (2 if training else 1) * (fsdp - 1) * here * min(width, leaf.dtype.itemsize)
        if not training:
            continue
        totals['gradients'] += (fsdp - 1) * here * leaf.dtype.itemsize
        copies = math.prod(mesh.shape[axis] for axis in ('data', 'fsdp', 'expert') if _along(sharding, axis) == 1)
        totals['gradients'] += 2 * (copies - 1) / copies * here * leaf.dtype.itemsize
    split = math.prod(mesh.shape[axis] for axis in ('data', 'fsdp', 'expert'))
    tensor, sequence = mesh.shape['tensor'], mesh.shape['sequence']
    directions = 2 if training else 1
    sublayers = attention_layers(config) + _feed_forward_layers(config)
    tokens = rows / split * (sum(lengths) / len(lengths)) / sequence
    totals['activations'] += directions * sublayers * 2 * (tensor - 1) / tensor * tokens * config.d_model * width
    keys = tokens * config.kv_heads / tensor * (config.key_dim + config.value_dim) * width
    totals['activations'] += directions * attention_layers(config) * (sequence - 1) * keys
    return totals


def _feed_forward_layers(config: ModelConfig) -> int:
    both = config.kind == 'encoder_decoder'
    return config.depth('encoder') + config.depth('decoder') if both else config.num_layers


def _along(sharding: NamedSharding, axis: str) -> int:
    named = [name for entry in sharding.spec if entry for name in ((entry,) if isinstance(entry, str) else entry)]
    return sharding.mesh.shape[axis] if axis in named else 1


def _width(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize
