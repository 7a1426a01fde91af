"""Prefill and step as StableHLO artefacts, which a process with JAX and nothing else can load and run.

`export_model` writes a folder: `prefill.bin` and `step.bin` (each a serialised `jax.export.Exported`), the parameters
`params.npz`, and `shapes.json`, which names every input. Arrays are passed as lists in the order of that file:

  prefill(params, tokens, mask)                       -> logits (B, V) after each row's last real token, cache
  prefill(params, tokens, mask, source, source_mask)     of an encoder-decoder
  step(params, tokens, cache)                         -> logits (B, V), cache

JAX writes and reads them with the help of the package flatbuffers (extra `export`). Shapes are those of the export:
rows and sources are padded up to them, a prompt on either side. One entry of the cache is `overflow`, true once more
tokens were read than its capacity holds. Greedy search, with JAX alone:

```python
import json
import sys

import jax
import numpy as np
from jax import export

folder, prompt = sys.argv[1], [int(token) for token in sys.argv[2].split(',')]
shapes = json.load(open(f'{folder}/shapes.json'))
prefill, step = (
    jax.jit(export.deserialize(open(f'{folder}/{name}.bin', 'rb').read()).call) for name in ('prefill', 'step')
)
stored = np.load(f'{folder}/params.npz')
params = [stored[entry['name']].view(jax.numpy.dtype(entry['dtype'])) for entry in shapes['params']]
given = [np.zeros(entry['shape'], entry['dtype']) for entry in shapes['prefill']]
# Of an encoder-decoder the prompt is the source, and the decoder begins with its start id, here 0.
tokens, mask = given[-2:]
tokens[0, : len(prompt)], mask[0, : len(prompt)] = prompt, True
if len(given) == 4:
    given[1][:, 0] = True
logits, cache = prefill(params, *given)
for _ in range(int(sys.argv[3])):
    tokens = np.asarray(logits).argmax(axis=-1)[:, None].astype(np.int32)
    print(tokens[0, 0])
    logits, cache = step(params, tokens, cache)
```
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from transformer_jax.config import ModelConfig
from transformer_jax.decoding.cache_api import for_decoding, init_cache, prefill, step
from transformer_jax.errors import UserError, choose
from transformer_jax.ops.quantized import pack, unpack_on_device

PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')


def export_model(
    folder: str | os.PathLike,
    model: nn.Module,
    params: Any,
    *,
    batch: int,
    prompt_length: int,
    capacity: int,
    source_length: int | None = None,
    platforms: Sequence[str] = ('cpu', 'cuda', 'tpu'),
) -> None:
    """Writes the artefacts of prefill and step for one set of shapes into a new or empty folder.

    Args:
      folder: where.
      model: a decoder or an encoder-decoder.
      params: its parameters, which are written beside the programs and passed to them.
      batch: rows.
      prompt_length: tokens of a padded prompt; of an encoder-decoder, of what its decoder starts from, often 1.
      capacity: most tokens which prompt and answer have together.
      source_length: tokens of a padded source, of an encoder-decoder.
      platforms: where the artefacts can run.

    Raises:
      UserError: on lengths which do not fit each other or the model, an unknown platform, or a folder with files.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"'{folder}' is not empty; give a new folder")
    for platform in platforms:
        choose('platform', platform, PLATFORMS)
    _check_lengths(model.config, batch, prompt_length, capacity, source_length)
    model, params = for_decoding(model, params)
    given = _named(params)
    # A file has no int4, which would take a byte each: the programs are given two to a byte.
    named = {name: pack(leaf) if leaf.dtype == jnp.int4 else leaf for name, leaf in given.items()}

    def whole(leaves):
        return _tree(params, [
            unpack_on_device(leaf, like.shape) if like.dtype == jnp.int4 else leaf
            for leaf, like in zip(leaves, given.values(), strict=True)
        ])  # fmt: skip

    def fill(leaves, tokens, mask, source=None, source_mask=None):
        cache = init_cache(model, batch, capacity, source, source_mask)
        logits, cache = prefill(model, whole(leaves), tokens, cache, mask, last_only=True)
        return logits[:, -1], cache

    rows = {'tokens': _shape((batch, prompt_length), 'int32'), 'mask': _shape((batch, prompt_length), 'bool')}
    if source_length is not None:
        sides = (batch, source_length)
        rows |= {'source': _shape(sides, 'int32'), 'source_mask': _shape(sides, 'bool')}
    weights = [_shape(leaf.shape, leaf.dtype) for leaf in named.values()]
    cache = jax.eval_shape(fill, weights, *rows.values())[1]

    def read(leaves, tokens, mask, *source):
        logits, cache = fill(leaves, tokens, mask, *source)
        return logits, jax.tree.leaves(cache)

    def advance(leaves, tokens, cache_leaves):
        logits, after = step(model, whole(leaves), tokens, _tree(cache, cache_leaves))
        return logits[:, -1], jax.tree.leaves(after)

    one = {'tokens': _shape((batch, 1), 'int32')}
    programs = {
        'prefill': (read, (weights, *rows.values())),
        'step': (advance, (weights, *one.values(), jax.tree.leaves(cache))),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (function, arguments) in programs.items():
        exported = export.export(jax.jit(function), platforms=tuple(platforms))(*arguments)
        (folder / f'{name}.bin').write_bytes(exported.serialize())
    np.savez(folder / 'params.npz', **named)
    about = {'params': named, 'prefill': rows, 'step': one, 'cache': _named(cache)}
    described = {group: [_describe(name, leaf) for name, leaf in entries.items()] for group, entries in about.items()}
    (folder / 'shapes.json').write_text(json.dumps(described | {'platforms': list(platforms)}, indent=1) + '\n')


def _check_lengths(
    config: ModelConfig, batch: int, prompt_length: int, capacity: int, source_length: int | None
) -> None:
    for name, length in (('batch', batch), ('prompt_length', prompt_length), ('source_length', source_length)):
        if length is not None and length < 1:
            raise UserError(f'{name} = {length}; it must be at least 1')
    if capacity < prompt_length:
        raise UserError(f'capacity = {capacity} is less than prompt_length = {prompt_length}; it counts the prompt too')
    longest = max(capacity, source_length or 0)
    if config.max_positions is not None and longest > config.max_positions:
        raise UserError(f'{longest} positions are asked for; the model has {config.max_positions}')
    if (source_length is None) == (config.kind == 'encoder_decoder'):
        raise UserError(f"kind '{config.kind}' {'needs a' if source_length is None else 'takes no'} source_length")


def _named(tree: Any) -> dict[str, Any]:
    """Returns {path: leaf}, arrays as numpy's."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf) if hasattr(leaf, '__array__') else leaf
        for path, leaf in flat
    }


def _tree(like: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _shape(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _describe(name: str, leaf: Any) -> dict[str, Any]:
    return {'name': name, 'shape': list(leaf.shape), 'dtype': str(leaf.dtype)}
