"""The table shown at start: where every parameter lies and what it costs each device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.sharding.mesh import device_bytes
from transformer_jax.sharding.rules import DEFAULT_RULES, Rules, resolve


class _Row(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    spec: PartitionSpec
    bytes: int
    bytes_per_device: int


def _rows(abstract: Any, axes: Any, mesh: Mesh, rules: Rules) -> list[_Row]:
    paths, structure = jax.tree_util.tree_flatten_with_path(abstract)
    shardings = structure.flatten_up_to(resolve(abstract, axes, mesh, rules))
    rows = []
    for (path, leaf), logical, sharding in zip(paths, structure.flatten_up_to(axes), shardings, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        here = bytes_per_device(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
        in_all = math.prod(leaf.shape) * leaf.dtype.itemsize
        rows.append(_Row(name, leaf.shape, str(leaf.dtype), tuple(logical), sharding.spec, in_all, here))
    return rows


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes which a tree of arrays, or of ShapeDtypeStructs with shardings, takes on each device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def startup_table(abstract: Any, axes: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> str:
    """Returns a table of name, shape, dtype, logical axes, spec and bytes per device of every array, with totals.

    Args: as in `transformer_jax.sharding.resolve`, whose errors it raises.
    """
    rows = _rows(abstract, axes, mesh, rules)
    cells = [('name', 'shape', 'dtype', 'logical axes', 'spec', 'bytes per device')]
    for row in rows:
        cells.append(
            (
                row.name,
                ' x '.join(map(str, row.shape)) or 'scalar',
                row.dtype,
                ' '.join(axis or '-' for axis in row.axes) or '-',
                _spec(row.spec),
                f'{row.bytes_per_device:,}',
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = []
    for line in cells:
        left = [cell.ljust(width) for cell, width in zip(line[:-1], widths[:-1], strict=True)]
        lines.append('  '.join([*left, line[-1].rjust(widths[-1])]))
    lines.insert(1, '  '.join('-' * width for width in widths))
    count = sum(math.prod(row.shape) for row in rows)
    shape = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items() if size > 1) or 'one device'
    lines.append(
        f'{count:,} values, {sum(row.bytes for row in rows):,} bytes in all, '
        f'{sum(row.bytes_per_device for row in rows):,} bytes per device; mesh {shape}'
    )
    return '\n'.join(lines)


def _spec(spec: PartitionSpec) -> str:
    entries = ([entry] if isinstance(entry, str) else entry or ['-'] for entry in spec)
    return ' '.join('+'.join(entry) for entry in entries) or '-'


def check_memory(state: Any, mesh: Mesh) -> str:
    """Returns a line which holds the bytes of a state (shapes with shardings) against the memory of a device.

    Raises:
      UserError: if the state alone is larger than a device.
    """
    needed, device = bytes_per_device(state), mesh.local_devices[0]
    memory = device_bytes(device)
    if needed > memory:
        raise UserError(
            f'parameters and optimizer state take {needed:,} bytes on each device, and a {device.device_kind} has '
            f'{memory:,}; raise mesh.fsdp or mesh.tensor (mesh.layout = auto chooses fsdp), or take more devices'
        )
    return (
        f'parameters and optimizer state: {needed:,} bytes of the {memory:,} of each {device.device_kind} device '
        f'({100 * needed / memory:.1f} %); gradients and activations come on top'
    )


def check_replicated(abstract: Any, axes: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES, *, limit_bytes: int) -> None:
    """Refuses large arrays which every device would hold whole although the mesh is there to split parameters.

    Raises:
      UserError: naming each array above `limit_bytes` that no mesh axis splits while fsdp, tensor or expert exceeds 1.
    """
    if all(mesh.shape[axis] == 1 for axis in ('fsdp', 'tensor', 'expert')):
        return
    whole = [row for row in _rows(abstract, axes, mesh, rules) if row.bytes == row.bytes_per_device > limit_bytes]
    if whole:
        listed = ', '.join(f'{row.name} {row.shape} {row.axes} of {row.bytes:,} bytes' for row in whole)
        raise UserError(
            f'every device would hold these arrays whole, above the limit of {limit_bytes:,} bytes: {listed}; '
            'give one of their logical axes a rule, or raise mesh.replicated_mib'
        )
