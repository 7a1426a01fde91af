"""From logical axis names of parameters to shardings; nothing is left whole in silence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError, suggest

MESH_AXES = ('data', 'fsdp', 'expert', 'sequence', 'tensor')
"""Outermost first: the axes which communicate most per step lie on neighbouring devices."""

Rules = Mapping[str, tuple[str, ...]]

DEFAULT_RULES: Rules = MappingProxyType(
    {
        'batch': ('data', 'fsdp', 'expert'),
        'length': ('sequence',),
        'embed': ('fsdp',),
        'heads': ('tensor',),
        'kv_heads': ('tensor',),
        'head_dim': (),
        'mlp': ('tensor',),
        'vocab': ('tensor',),
        'experts': ('expert',),
        'layers': (),
        'positions': (),
        'types': (),
        'classes': (),
        'buckets': (),
    }
)
"""Mesh axes of each logical axis: data parallel, FSDP over D, tensor parallel over N, K, F and V, experts over E."""


def parse_rules(text: str) -> Rules:
    """Returns the default rules with the changes of `text`, such as 'kv_heads=none,vocab=tensor+fsdp'.

    Raises:
      UserError: for an unknown logical or mesh axis, with the nearest which is known.
    """
    rules = dict(DEFAULT_RULES)
    for entry in filter(None, text.replace(' ', '').split(',')):
        name, sign, axes = entry.partition('=')
        if not sign or not axes:
            raise UserError(f"mesh.rules has '{entry}'; a rule is NAME=AXIS, NAME=AXIS+AXIS or NAME=none")
        if name not in rules:
            raise UserError(f"mesh.rules names the logical axis '{name}'{suggest(name, rules)}")
        rules[name] = () if axes == 'none' else tuple(axes.split('+'))
        for axis in rules[name]:
            if axis not in MESH_AXES:
                raise UserError(f"mesh.rules gives '{name}' the mesh axis '{axis}'{suggest(axis, MESH_AXES)}")
    return MappingProxyType(rules)


def resolve(abstract: Any, axes: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Returns the NamedSharding of every array of a tree.

    Args:
      abstract: tree of arrays or ShapeDtypeStructs.
      axes: the same tree with, per array, a tuple of logical names, one per dimension; None leaves a dimension whole.
      mesh: from `make_mesh`.
      rules: logical name -> mesh axes; `()` leaves the dimension whole.

    Raises:
      UserError: naming the array and the logical axis, for an unknown name, a wrong number of names, a mesh axis asked
        for twice, or a size which does not divide.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(abstract)
    try:
        names_of_leaves = structure.flatten_up_to(axes)
    except ValueError as error:
        raise UserError(f'the tree of logical axes differs from the tree of arrays: {error}') from None
    shardings = []
    for (path, leaf), logical in zip(paths, names_of_leaves, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        shardings.append(NamedSharding(mesh, resolve_one(name, leaf.shape, logical, mesh, rules)))
    return structure.unflatten(shardings)


def resolve_one(
    name: str, shape: Sequence[int], logical: Sequence[str | None], mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> PartitionSpec:
    """Returns the PartitionSpec of one array; mesh axes of size 1 are left out of it. Errors as in `resolve`."""
    if len(logical) != len(shape):
        raise UserError(f"'{name}' has shape {tuple(shape)} but {len(logical)} logical axes {tuple(logical)}")
    taken: dict[str, str] = {}
    entries = []
    for size, axis in zip(shape, logical, strict=True):
        if axis is not None and axis not in rules:
            raise UserError(f"'{name}' has the logical axis '{axis}', for which there is no rule{suggest(axis, rules)}")
        mesh_axes = () if axis is None else rules[axis]
        for mesh_axis in mesh_axes:
            if mesh_axis not in mesh.shape:
                raise UserError(f"rule '{axis}' names the mesh axis '{mesh_axis}'{suggest(mesh_axis, mesh.shape)}")
            if mesh_axis in taken:
                raise UserError(
                    f"'{name}' {tuple(logical)} asks for the mesh axis '{mesh_axis}' twice, by '{taken[mesh_axis]}' "
                    f"and '{axis}'; give one of them another name or rule"
                )
            taken[mesh_axis] = axis
        divisor = math.prod(mesh.shape[mesh_axis] for mesh_axis in mesh_axes)
        if size % divisor:
            sizes = ' x '.join(f"'{mesh_axis}' {mesh.shape[mesh_axis]}" for mesh_axis in mesh_axes)
            raise UserError(
                f"'{name}' {tuple(shape)}: logical axis '{axis}' of size {size} does not divide by mesh axis {sizes}; "
                f"choose a mesh which divides {size}, or the rule '{axis}': () to keep it whole"
            )
        entries.append(tuple(mesh_axis for mesh_axis in mesh_axes if mesh.shape[mesh_axis] > 1))
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))
