"""Quantisation for inference: weights as small integers with scales, and an int8 cache, by name.

`quantize` takes any model and parameters, trained here or imported, and gives a model and parameters which go wherever
the others went: `generate`, `prefill`, `step`, `export_model`. What multiplies a matrix, and a table of embeddings, is
quantised; norms, biases, routers of experts and tables of relative positions stay as they are.

  weights             integers                     one scale (bf16) for each
  'int8'              int8, products in floats     output column of a matrix; row of a table
  'int8_activations'  int8, products in int8       the same, and each vector which a matrix multiplies is rounded too
  'int4'              int4, products in floats     group of `group` inputs of a column; of `group` numbers of a row

  cache 'int8'        keys and values of attention, one scale (bf16) for each token and head

Matrices of experts and of latent attention are made floats before they multiply, also under 'int8_activations'.
"""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError, choose
from transformer_jax.huggingface.tensors import TensorFolder, read_json, write_tensors
from transformer_jax.layers.embedding import Table
from transformer_jax.layers.linear import Kernel, Linear
from transformer_jax.models import abstract_params, build, unroll_params
from transformer_jax.ops.quantized import QuantizedArray, pack, unpack
from transformer_jax.ops.quantized import quantize as quantize_array

WEIGHTS = ('none', 'int8', 'int8_activations', 'int4')
CACHES = ('none', 'int8')
DESCRIPTION = 'quantized.json'
_SHARD_BYTES = 4 << 30
Path_ = tuple[str, ...]


def quantize(
    model: nn.Module, params: Any, weights: str = 'int8', *, cache: str = 'none', group: int = 32
) -> tuple[nn.Module, Any]:
    """Returns the model, with unrolled layers, and its parameters quantised; both as they are if nothing is to be.

    Args:
      model: from `build`, `restore` or `load_pretrained`.
      params: its parameters, on the host or on devices.
      weights: 'int8', 'int8_activations', 'int4' or 'none'.
      cache: 'int8' or 'none'.
      group: inputs which share a scale in 'int4'; must divide the inputs of every matrix.

    Raises:
      UserError: for an unknown name, parameters which are quantised already or not finite, a group which does not
        divide a matrix, an int8 cache for latent attention, or where qwix is not installed.
    """
    choose('weights', weights, WEIGHTS)
    choose('cache', cache, CACHES)
    if weights == cache == 'none':
        return model, params
    if any(isinstance(leaf, QuantizedArray) for leaf in _leaves(params).values()):
        raise UserError('the parameters are quantised already; quantise those of the checkpoint')
    config: ModelConfig = model.config
    quantized = build(
        config.replace(layer_stack='unrolled', remat='none', cache_dtype='int8' if cache == 'int8' else 'compute')
    )
    params = unroll_params(params, config)
    if weights == 'none':
        return quantized, params
    inputs = _input_axes(quantized)

    def convert(path: tuple[Any, ...], leaf: Any) -> Any:
        name = tuple(entry.key for entry in path)
        if name not in inputs:
            return leaf
        blocks = _blocks(leaf.shape, inputs[name], group if weights == 'int4' else None, '/'.join(name))
        converted, finite = _convert(leaf, 4 if weights == 'int4' else 8, blocks, weights == 'int8_activations')
        if not finite:
            raise UserError(f"parameter '{'/'.join(name)}' holds numbers which are not finite; it cannot be quantised")
        return converted

    return quantized, jax.tree_util.tree_map_with_path(convert, params)


def dequantize(params: Any) -> Any:
    """Returns parameters of which all are floats again, the quantised ones fp32."""

    def floats(leaf):
        return leaf.astype('float32') if isinstance(leaf, QuantizedArray) else leaf

    return jax.tree.map(floats, params, is_leaf=_is_quantized)


def save_quantized(folder: str | os.PathLike, model: nn.Module, params: Any) -> None:
    """Writes quantised parameters as safetensors, int4 two to a byte, and beside them what `load_quantized` needs.

    Raises:
      UserError: where the folder holds files already.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"'{folder}' is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    tensors, arrays = {}, {}
    for name, leaf in _leaves(params).items():
        if not isinstance(leaf, QuantizedArray):
            tensors[name] = np.asarray(leaf)
            continue
        values = np.asarray(leaf.values)
        arrays[name] = {'shape': list(values.shape), 'dtype': str(values.dtype), 'activations': leaf.activations}
        tensors[f'{name}/values'] = pack(values) if values.dtype == 'int4' else values
        tensors[f'{name}/scale'] = np.asarray(leaf.scale)
    write_tensors(folder, tensors.items(), _SHARD_BYTES)
    about = {'model': model.config.to_dict(), 'arrays': arrays}
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=1) + '\n')


def load_quantized(folder: str | os.PathLike) -> tuple[nn.Module, Any]:
    """Returns the model and the parameters, on the host, which `save_quantized` wrote.

    Raises:
      UserError: where files are missing, cut short, or do not fit each other.
    """
    folder = Path(folder)
    about = read_json(folder / DESCRIPTION)
    stored, tree = TensorFolder(folder), {}
    model = build(ModelConfig.from_dict(about['model']))
    expected = _leaves(abstract_params(model)[0])
    names = {name.removesuffix('/values') for name in stored.shapes if not name.endswith('/scale') or name in expected}
    if names != set(expected):
        raise UserError(f'{folder} does not fit its {DESCRIPTION}: {", ".join(sorted(names ^ set(expected)))}')
    for name in expected:
        if name in about['arrays']:
            array = about['arrays'][name]
            values = stored.read(f'{name}/values')
            values = unpack(values, array['shape']) if array['dtype'] == 'int4' else values
            leaf = QuantizedArray(values, stored.read(f'{name}/scale'), array['activations'])
        else:
            leaf = stored.read(name)
        if leaf.shape != expected[name].shape:
            raise UserError(f"'{name}' in {folder} has shape {leaf.shape}; the model has {expected[name].shape}")
        *parents, last = name.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return model, tree


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _convert(
    leaf: jax.Array, bits: int, blocks: tuple[int, ...], activations: bool
) -> tuple[QuantizedArray, jax.Array]:
    return quantize_array(leaf, bits, blocks, activations), jax.numpy.isfinite(leaf).all()


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


def _leaves(params: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_quantized)[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in flat}


def _input_axes(model: nn.Module) -> dict[Path_, tuple[int, ...]]:
    """Returns {path: axes which a product sums over} of every parameter which is quantised; the layers say it."""
    found: dict[Path_, tuple[int, ...]] = {}

    def note(method, args, kwargs, context):
        module = context.module
        if isinstance(module, Linear):
            found[(*module.path, 'kernel')] = tuple(range(module.inputs))
        elif isinstance(module, Table):
            found[(*module.path, 'embedding')] = (1,)
        elif isinstance(module, Kernel) and 'router' not in module.path:
            found[(*module.path, 'kernel')] = (1 if 'experts' in module.axes else 0,)
        return method(*args, **kwargs)

    with nn.intercept_methods(note):
        abstract_params(model)
    return found


def _blocks(shape: tuple[int, ...], inputs: tuple[int, ...], group: int | None, name: str) -> tuple[int, ...]:
    """Returns how many blocks each axis has: one over all inputs, or as many as groups; output axes have single slices.

    A group takes as much of the last input axis as divides it, and the rest of the axis before: of (4, 48) inputs a
    group of 32 is 2 x 16.
    """
    blocks = list(shape)
    if group is None:
        for axis in inputs:
            blocks[axis] = 1
        return tuple(blocks)
    left = group
    for axis in reversed(inputs):
        tile = math.gcd(left, shape[axis])
        blocks[axis] = shape[axis] // tile
        left //= tile
    if left > 1:
        sizes = ' x '.join(str(shape[axis]) for axis in inputs)
        raise UserError(f"groups of {group} do not divide the {sizes} inputs of '{name}'; groups of {group // left} do")
    return tuple(blocks)
