"""Which tensor of theirs holds which parameters of ours, for one model: a family's weight table written out."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.huggingface.family import Family, Weight
from transformer_jax.huggingface.rearrange import Rearrange
from transformer_jax.models import abstract_params, build, scan_params, unroll_params

_STACKS = ('encoder', 'decoder')


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of theirs.

    Attributes:
      name: of the tensor; shape: what it should be.
      ours: canonical paths of the parameters in it; shapes: theirs.
      rearrange: how one becomes the other.
      row: number of its row of the table.
      expert: the row of the parameters which it holds, where they hold a matrix per expert; None: all of them.
    """

    name: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rearrange: Rearrange
    row: int
    expert: int | None = None


def flatten(tree: Any) -> dict[str, Any]:
    """Returns the leaves of nested dicts by path, 'decoder/layers_0/attention/query/kernel'."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


@functools.lru_cache(maxsize=8)
def canonical_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of every parameter by its path in the unrolled tree."""
    shapes, _ = abstract_params(build(config))
    unrolled = jax.eval_shape(lambda params: unroll_params(params, config), shapes)
    return MappingProxyType({path: leaf.shape for path, leaf in flatten(unrolled).items()})


def make_plan(family: Family, config: ModelConfig) -> list[Part]:
    """Returns every tensor which a model of the family has; together they hold each of its parameters once."""
    shapes = canonical_shapes(config)
    parts = []
    for number, row in enumerate(family.weights):
        if not _applies(row, shapes):
            continue
        rearrange = Rearrange(row.axes)
        for i in range(_layers(row, config)):
            ours = tuple(path.replace('{i}', str(i)) for path in row.ours.split())
            if not all(path in shapes for path in ours):
                continue
            name = row.theirs.replace('{i}', str(i))
            if '{e}' not in name:
                own = tuple(shapes[path] for path in ours)
                parts.append(Part(name, rearrange.theirs_shape(own), ours, own, rearrange, number))
                continue
            own = tuple(shapes[path][1:] for path in ours)
            for e in range(config.mixture.num_experts):
                expert = name.replace('{e}', str(e))
                parts.append(Part(expert, rearrange.theirs_shape(own), ours, own, rearrange, number, e))
    held = [path for part in parts if part.expert in (None, 0) for path in part.ours]
    names = [part.name for part in parts]
    if sorted(held) != sorted(shapes) or len(set(names)) != len(names):
        twice = sorted({path for path in held if held.count(path) > 1} | {n for n in names if names.count(n) > 1})
        raise AssertionError(f'the weight table of {family.model_type} lacks {sorted(set(shapes) - set(held))} '
                             f'and has {twice} twice')  # fmt: skip
    return parts


def _applies(row: Weight, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    given = any(path.startswith(row.given) for path in shapes)
    return given and (row.unless is None or not any(path.startswith(row.unless) for path in shapes))


def _layers(row: Weight, config: ModelConfig) -> int:
    stack = row.ours.split('/')[0]
    return config.depth(stack) if '{i}' in row.theirs and stack in _STACKS else 1


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a canonical parameter lies in the model's own tree: a leaf, and a row of it where layers are scanned."""

    leaf: str
    row: int | None


def slots(config: ModelConfig) -> dict[str, Slot]:
    """Returns where each canonical parameter lies; the layout is `scan_params`'s, followed with numbers for arrays."""
    paths = list(canonical_shapes(config))
    tree: dict[str, Any] = {}
    for number, path in enumerate(paths):
        _put(tree, path, np.asarray(number))
    if config.layer_stack == 'scan':
        tree = scan_params(tree, config)
    found = {}
    for leaf, numbers in flatten(tree).items():
        for row, number in enumerate(np.atleast_1d(numbers)):
            found[paths[number]] = Slot(leaf, row if numbers.ndim else None)
    return found


def _put(tree: dict[str, Any], path: str, leaf: Any):
    *parents, last = path.split('/')
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = leaf


def unflatten(leaves: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        _put(tree, path, leaf)
    return tree


def bare_name(family: Family, config: ModelConfig, name: str) -> str:
    """Returns the name which a tensor has in a file of this model: without the base prefix where there is no head."""
    bare = config.head == 'none'
    return name.removeprefix(family.base_prefix) if bare else name


def full_name(family: Family, known: set[str], name: str) -> str:
    """Returns the name of the table for a name of a file: older names renamed, a missing base prefix added."""
    for pattern, replacement in family.renames:
        name = re.sub(pattern, replacement, name)
    if name in known:
        return name
    with_prefix = family.base_prefix + name
    derived = any(re.fullmatch(row.pattern, with_prefix) for row in family.derived)
    return with_prefix if with_prefix in known or derived else name
