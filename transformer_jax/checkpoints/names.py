"""Names of the arrays of a pytree: `params/encoder/layers/mlp/kernel`, and what each array must look like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.errors import UserError


class ArrayInfo(NamedTuple):
    """Shape, dtype and size in bytes of one array; a random key counts as the integers it is stored as."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {name: leaf}, the name being the path of the leaf with its parts joined by `/`.

    Fields of dataclasses and named tuples go by name, elements of tuples by number; empty nodes (None,
    optax.EmptyState) have no name, so they come back from the structure of the caller and never from the disk.

    Raises:
      UserError: if a part contains `/`, or two names would be one file on disk.
    """
    leaves: dict[str, Any] = {}
    files: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
        name = '/'.join(parts)
        if not parts or any('/' in part or not part for part in parts):
            raise UserError(f"a state's arrays need non-empty names without '/'; this one is {parts}")
        file = '.'.join(parts)
        if file in files:
            raise UserError(f"arrays '{name}' and '{files[file]}' would share the file '{file}'; rename one")
        files[file] = name
        leaves[name] = leaf
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts from {name: leaf}; the inverse of `named_leaves` on nested dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def is_key(leaf: Any) -> bool:
    """Whether `leaf` (array or ShapeDtypeStruct) is a typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_implementation(leaf: Any) -> str:
    """Returns the name of a random key's algorithm, such as `threefry2x32`, from an array or a ShapeDtypeStruct."""
    found: list[str] = []

    def look(key: jax.Array) -> jax.Array:
        found.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    jax.eval_shape(look, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return found[0]


def storable(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of the integers or floats which stand on disk for `leaf`."""
    struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if is_key(leaf):
        struct = jax.eval_shape(jax.random.key_data, struct)
    sharding = leaf.sharding if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else None
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def describe(leaves: Mapping[str, Any]) -> dict[str, ArrayInfo]:
    """Returns {name: ArrayInfo} of arrays or ShapeDtypeStructs.

    Raises:
      UserError: naming a leaf which is no array.
    """
    infos = {}
    for name, leaf in leaves.items():
        if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
            raise UserError(f"'{name}' is a {type(leaf).__name__}; a state holds arrays only, so wrap it in an array")
        stored = storable(leaf)
        dtype = f'key:{key_implementation(leaf)}' if is_key(leaf) else str(leaf.dtype)
        infos[name] = ArrayInfo(tuple(leaf.shape), dtype, stored.size * stored.dtype.itemsize)
    return infos


def differences(saved: Mapping[str, ArrayInfo], wanted: Mapping[str, ArrayInfo]) -> list[str]:
    """Returns every difference between a checkpoint and a state in words: missing, unexpected, shape, dtype."""
    lines = []
    common = [name for name in wanted if name in saved]
    groups: list[tuple[str, Iterable[str]]] = [
        ('missing from the checkpoint', (_show(name, wanted[name]) for name in wanted if name not in saved)),
        ('not in the state', (_show(name, saved[name]) for name in saved if name not in wanted)),
        (
            'shape differs',
            (
                f'{name} is {saved[name].shape} in the checkpoint and {wanted[name].shape} in the state'
                for name in common
                if saved[name].shape != wanted[name].shape
            ),
        ),
        (
            'dtype differs',
            (
                f'{name} is {saved[name].dtype} in the checkpoint and {wanted[name].dtype} in the state'
                for name in common
                if saved[name].dtype != wanted[name].dtype
            ),
        ),
    ]
    for what, entries in groups:
        listed = list(entries)
        if listed:
            lines.append(f'{what} ({len(listed)}): {", ".join(listed)}')
    return lines


def _show(name: str, info: ArrayInfo) -> str:
    return f'{name} {info.shape} {info.dtype}'
