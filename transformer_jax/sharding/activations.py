"""Where activations lie: constraints by logical names, for layers which know no mesh."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from transformer_jax.sharding.rules import DEFAULT_RULES, Rules

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar('rules', default=DEFAULT_RULES)


@contextlib.contextmanager
def tracing_on(mesh: Mesh | None, rules: Rules = DEFAULT_RULES) -> Iterator[None]:
    """Makes `constrain` speak of this mesh while a function is traced; entered inside the function, not around jit.

    Without a mesh, or with one of a single device, everything stays as it is.
    """
    if mesh is None or mesh.size == 1:
        yield
        return
    before = _rules.set(rules)
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    finally:
        _rules.reset(before)


def current_mesh() -> AbstractMesh | None:
    """Returns the mesh of `tracing_on`; None without one, and inside `shard_map`, where every device is by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes else mesh


def axes_of(name: str | None, size: int, mesh: AbstractMesh) -> tuple[str, ...]:
    """Returns the mesh axes above size 1 which split a dimension; none where they do not divide it.

    Unlike a parameter, an activation may stay whole: a step of decoding has one position, however many a prompt has.
    """
    if name is None:
        return ()
    axes = tuple(axis for axis in _rules.get()[name] if mesh.shape[axis] > 1)
    return () if size % math.prod(mesh.shape[axis] for axis in axes) else axes


def spec_of(shape: Sequence[int], names: Sequence[str | None], mesh: AbstractMesh) -> PartitionSpec:
    """Returns the PartitionSpec of an activation (see `axes_of`); an axis goes to the first dimension it can split."""
    taken: set[str] = set()
    entries = []
    for name, size in zip(names, shape, strict=True):
        axes = axes_of(name, size, mesh)
        entries.append(None if taken.intersection(axes) else axes or None)
        taken.update(axes)
    return PartitionSpec(*entries)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns x, laid out by the rules of its logical axes, one name per dimension; None leaves a dimension whole.

    It changes no value, and does nothing outside `tracing_on`.
    """
    mesh = current_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec_of(x.shape, names, mesh))


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh on which the arrays (or shardings) of a tree lie, None if they lie on none."""
    for leaf in jax.tree.leaves(tree):
        sharding = leaf if isinstance(leaf, jax.sharding.Sharding) else getattr(leaf, 'sharding', None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    return None
