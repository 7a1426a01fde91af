"""Parameters of a model: made, described without being made, and converted between scanned and unrolled trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.models.stack import at_layer

Params = dict[str, Any]


def _init_boxed(model: nn.Module, key: jax.Array):
    if model.config.kind == 'vision':
        patches = model.config.patches
        return model.init(key, jnp.zeros((1, *patches.image_size, patches.channels)))['params']
    tokens = jnp.zeros((1, 1), jnp.int32)
    if model.config.kind == 'encoder_decoder':
        return model.init(key, source_tokens=tokens, target_tokens=tokens)['params']
    return model.init(key, tokens)['params']


def init_params(model: nn.Module, key: jax.Array) -> Params:
    """Returns fresh parameters, a nested dict of arrays."""
    return nn.meta.unbox(_init_boxed(model, key))


def abstract_params(model: nn.Module) -> tuple[Params, Params]:
    """Returns (shapes, logical axes) of the parameters without making them: two trees of the same structure.

    The leaves are `jax.ShapeDtypeStruct` and tuples of logical names.
    """
    boxed = jax.eval_shape(lambda: _init_boxed(model, jax.random.key(0)))
    axes = jax.tree.map(
        lambda box: tuple(box.names), boxed, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    )
    return nn.meta.unbox(boxed), axes


def count_params(params: Params) -> int:
    """Returns the number of parameters of a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def resize_vocabulary(params: Params, axes: Params, rows: int) -> Params:
    """Returns parameters whose 'vocab' axes are cut, or filled up with zeros, to `rows`; these as numpy arrays.

    Args:
      axes: logical axes of each parameter, from `abstract_params`.
    """

    def resize(leaf, names):
        shape = tuple(rows if name == 'vocab' else size for name, size in zip(names, leaf.shape, strict=True))
        return leaf if shape == leaf.shape else fit_shape(leaf, shape)

    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(map(resize, leaves, structure.flatten_up_to(axes)))


def fit_shape(array: Any, shape: Sequence[int]) -> np.ndarray:
    """Returns the array cut, or filled up with zeros, to `shape`."""
    cut = np.asarray(array)[tuple(slice(0, size) for size in shape)]
    fitted = np.zeros(shape, cut.dtype)
    fitted[tuple(slice(0, size) for size in cut.shape)] = cut
    return fitted


def unroll_params(params: Params, config: ModelConfig) -> Params:
    """Returns the canonical tree, `layers_0 ... layers_{L-1}` in each stack, of a scanned or unrolled one."""
    return {name: _unroll(value, config) if name in ('encoder', 'decoder') else value for name, value in params.items()}


def _unroll(stack: Mapping[str, Any], config: ModelConfig) -> Params:
    unrolled = {name: value for name, value in stack.items() if name != 'layers'}
    for j, blocks in ((int(name.split('_')[1]), blocks) for name, blocks in stack.get('layers', {}).items()):
        for repeat in range(jax.tree.leaves(blocks)[0].shape[0]):
            index = config.prefix_layers + repeat * len(config.layer_pattern) + j
            unrolled[f'layers_{index}'] = at_layer(blocks, repeat)
    return unrolled


def scan_params(params: Params, config: ModelConfig) -> Params:
    """Returns the tree of `layer_stack='scan'` of a canonical one; the inverse of `unroll_params`."""
    return {
        name: _scan(value, config, config.depth(name)) if name in ('encoder', 'decoder') else value
        for name, value in params.items()
    }


def _scan(stack: Mapping[str, Any], config: ModelConfig, depth: int) -> Params:
    period, prefix = len(config.layer_pattern), config.prefix_layers
    repeats = max(depth - prefix, 0) // period
    scanned = {name: value for name, value in stack.items() if not name.startswith('layers')}
    for i in (*range(min(prefix, depth)), *range(prefix + repeats * period, depth)):
        scanned[f'layers_{i}'] = stack[f'layers_{i}']
    if repeats:
        scanned['layers'] = {
            f'block_{j}': jax.tree.map(
                lambda *leaves: _stack(leaves), *(stack[f'layers_{prefix + r * period + j}'] for r in range(repeats))
            )
            for j in range(period)
        }
    return scanned


def _stack(leaves):
    return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else jnp.stack(leaves)
