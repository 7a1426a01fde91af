"""From a Hugging Face folder to a model and its parameters."""

from __future__ import annotations

import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import DTYPES, ModelConfig
from transformer_jax.errors import UserError, choose
from transformer_jax.huggingface.families import FAMILIES
from transformer_jax.huggingface.family import Derived, Family, read_config
from transformer_jax.huggingface.generation import read_generation
from transformer_jax.huggingface.plan import Part, flatten, full_name, make_plan, slots, unflatten
from transformer_jax.huggingface.tensors import TensorFolder, Tensors, read_json
from transformer_jax.huggingface.tokenizer_files import check_vocabulary
from transformer_jax.models import build

_logger = logging.getLogger(__name__)


def load_pretrained(
    folder: str | os.PathLike,
    dtype: str | None = None,
    *,
    layer_stack: str = 'scan',
    shardings: Any = None,
    generation: bool = True,
) -> tuple[nn.Module, dict[str, Any]]:
    """Reads a Hugging Face folder: config.json, safetensors in one file or in shards, generation_config.json.

    Every tensor is read once, one at a time; no more than one parameter of ours (of all layers, where they are
    scanned) lies in host memory beside those already placed. Nothing is unpickled and no code of the folder is run.

    Args:
      folder: on this machine; nothing is downloaded.
      dtype: of parameters and products, 'float32' or 'bfloat16'. None: as stored, bfloat16 where every learned tensor
        is (float16 becomes float32, which holds it exactly).
      layer_stack: 'scan' or 'unrolled', as in ModelConfig.
      shardings: tree of jax shardings like the parameters; None leaves numpy arrays on the host. `pretrained_config`
        gives the config from which `abstract_params` and `sharding.resolve` make it.
      generation: False leaves out generation_config.json.

    Returns:
      (model, params); the model's config has the folder's generation settings as `decode`.

    Raises:
      UserError: in one line, for an unknown architecture, a field or value of a config which is not supported, a file
        which is missing or cut short, a vocabulary smaller than the tokenizer's, and for tensors which are missing,
        unexpected, of a wrong shape or type, or unequal to what they are tied to, all listed by name.
    """
    folder = Path(folder)
    family, config, tensors = _open(folder, dtype, layer_stack, generation)
    check_vocabulary(folder, config.vocab_size)
    return build(config), read_params(family, config, tensors, folder, shardings)


def pretrained_config(
    folder: str | os.PathLike, dtype: str | None = None, *, layer_stack: str = 'scan', generation: bool = True
) -> ModelConfig:
    """Returns the ModelConfig which `load_pretrained` gives its model, without reading a weight.

    Raises:
      UserError: as `load_pretrained`, for what is not about weights.
    """
    return _open(Path(folder), dtype, layer_stack, generation)[1]


def _open(folder: Path, dtype: str | None, layer_stack: str, generation: bool):
    where = folder / 'config.json'
    fields = read_json(where)
    if 'model_type' not in fields:
        raise UserError(f'{where} lacks model_type')
    family = FAMILIES[choose(f'{where}: model_type', fields['model_type'], FAMILIES)]
    tensors = TensorFolder(folder)
    known = {row.theirs for row in family.weights}
    names = {stored: full_name(family, known, stored) for stored in tensors.shapes}
    choices, unknown = read_config(family, fields, frozenset(names.values()), str(where))
    if unknown:
        _logger.warning('%s: nothing here reads the fields %s', where, ', '.join(unknown))
    if dtype is None:
        tables = [row.pattern for row in family.derived if row.value is not None]
        learned = [stored for stored, name in names.items() if not any(re.fullmatch(table, name) for table in tables)]
        dtype = tensors.widest_float(learned)
    choose('dtype', dtype, DTYPES)
    choices |= dict(dtype=dtype, param_dtype=dtype, layer_stack=layer_stack, initializer='normal')
    config = ModelConfig(**choices)
    if generation and family.generates and config.kind != 'encoder' and config.head == 'lm':
        config = config.replace(decode=read_generation(folder, fields, config))
    return family, config, tensors


def read_params(
    family: Family, config: ModelConfig, tensors: Tensors, where: Path, shardings: Any = None
) -> dict[str, Any]:
    """Returns the parameters of a model whose tensors bear the names of the family's weight table.

    Raises:
      UserError: as `load_pretrained`, for what is about weights.
    """
    plan = make_plan(family, config)
    return _read(config, plan, _match(family, config, plan, tensors, where), tensors, shardings)


def _match(
    family: Family, config: ModelConfig, plan: list[Part], tensors: Tensors, folder: Path
) -> dict[str, str]:
    """Returns, for the name of each part of the plan, the name of the file's tensor; optional ones may be absent."""
    expected = {part.name: part for part in plan}
    in_file = {full_name(family, set(expected), name): name for name in tensors.shapes}
    source, unexpected, unequal = {}, [], []
    spare: list[tuple[str, Derived]] = []
    for name, stored in in_file.items():
        if name in expected:
            source[name] = stored
            continue
        rows = [row for row in family.derived if re.fullmatch(row.pattern, name)]
        derived = next((row for row in rows if row.tied_to is None or row.tied_to in expected), None)
        if derived is None:
            unexpected.append(stored)
        else:
            spare.append((name, derived))
    for name, derived in spare:
        if derived.tied_to is not None and source.setdefault(derived.tied_to, in_file[name]) == in_file[name]:
            continue
        if not _agrees(config, derived, in_file[name], source, tensors):
            unequal.append(f'{in_file[name]} (should be {derived.tied_to or derived.reason})')
        lost = derived.tied_to is None and derived.value is None
        level = logging.WARNING if lost else logging.INFO
        _logger.log(level, '%s: %s is left out: %s', folder, in_file[name], derived.reason)
    missing = [name for name in expected if name not in source and name not in family.optional]
    misshaped, mistyped = [], []
    for name, stored in source.items():
        if tensors.shapes[stored] != expected[name].shape:
            misshaped.append(f'{stored} {tensors.shapes[stored]} (should be {expected[name].shape})')
        if not tensors.is_float(stored):
            mistyped.append(f'{stored} {tensors.dtypes[stored]}')
    problems = [
        f'{what}: {", ".join(sorted(names))}'
        for what, names in (
            ('missing', missing), ('unexpected', unexpected), ('wrong shape', misshaped), ('no float', mistyped),
            ('unequal', unequal),
        ) if names
    ]  # fmt: skip
    if problems:
        raise UserError(f'{folder}: the tensors are not those of a {family.model_type} model; {"; ".join(problems)}')
    return source


def _agrees(config: ModelConfig, derived: Derived, stored: str, source: dict[str, str], tensors: Tensors) -> bool:
    if derived.tied_to is not None:
        twin = source[derived.tied_to]
        same = tensors.shapes[stored] == tensors.shapes[twin]
        return same and np.array_equal(tensors.read(stored), tensors.read(twin), equal_nan=True)
    if derived.value is None:
        return True
    value = np.asarray(derived.value(config, tensors.shapes[stored]))
    held = tensors.read(stored)
    # Files hold these tables in 16 bits at times; a wrong table is off by far more.
    return value.shape == held.shape and np.allclose(held.astype(np.float64), value, rtol=2e-3, atol=2e-3)


def _place(held: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])


def _read(config: ModelConfig, plan: list[Part], source: dict[str, str], tensors: Tensors, shardings: Any):
    place = slots(config)
    lengths: dict[str, int] = {}
    for slot in place.values():
        if slot.row is not None:
            lengths[slot.leaf] = max(lengths.get(slot.leaf, 0), slot.row + 1)
    placed = {} if shardings is None else flatten(shardings)
    odd = sorted(placed.keys() ^ {slot.leaf for slot in place.values()})
    if shardings is not None and odd:
        raise UserError(f'shardings are not those of the parameters; one has, and the other lacks, {", ".join(odd)}')
    dtype = jnp.dtype(config.param_dtype)
    buffers: dict[str, np.ndarray] = {}
    leaves: dict[str, Any] = {}
    not_numbers = []

    def flush():
        for leaf, held in buffers.items():
            leaves[leaf] = held if shardings is None else _place(held, placed[leaf])
        buffers.clear()

    for before, part in zip([None, *plan[:-1]], plan, strict=True):
        if before is not None and before.row != part.row:
            flush()
        tensor = tensors.read(source[part.name]) if part.name in source else np.zeros(part.shape, dtype)
        if np.isnan(tensor).any():
            not_numbers.append(source[part.name])
        for path, ours in zip(part.ours, part.rearrange.read(tensor, part.shapes), strict=True):
            slot = place[path]
            layers = () if slot.row is None else (lengths[slot.leaf],)
            experts = () if part.expert is None else (config.mixture.num_experts,)
            if slot.leaf not in buffers:
                buffers[slot.leaf] = np.empty((*layers, *experts, *ours.shape), dtype)
            buffers[slot.leaf][tuple(i for i in (slot.row, part.expert) if i is not None)] = ours
    flush()
    if not_numbers:
        warnings.warn(f'tensors with NaN: {", ".join(not_numbers)}', stacklevel=3)
    return unflatten(leaves)
