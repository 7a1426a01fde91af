"""Rows of a batch, and positions of long ones, over devices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.sharding.rules import DEFAULT_RULES, Rules


def _axes(name: str, mesh: Mesh, rules: Rules) -> dict[str, int]:
    return {axis: mesh.shape[axis] for axis in rules[name] if mesh.shape[axis] > 1}


def row_devices(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> int:
    """Returns into how many parts the rows of a batch are split."""
    return math.prod(_axes('batch', mesh, rules).values())


def check_batch(rows: int, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> None:
    """Checks that every device gets the same number of rows.

    Raises:
      UserError: in words, with the nearest numbers of rows which would do.
    """
    axes = _axes('batch', mesh, rules)
    devices = math.prod(axes.values())
    if rows % devices or rows < 1:
        shown = ' x '.join(f'{axis} {size}' for axis, size in axes.items())
        below, above = rows // devices * devices, (rows // devices + 1) * devices
        choices = f'{below} or {above}' if below > 0 else f'{above}'
        raise UserError(
            f'a batch of {rows} rows does not divide into {devices} data devices ({shown or "one device"}); '
            f'choose {choices} rows, or another mesh'
        )


def batch_sharding(mesh: Mesh, rank: int, rules: Rules = DEFAULT_RULES) -> NamedSharding:
    """Returns the sharding of an array of a batch: rows first, and of two dimensions the second is positions.

    Other dimensions stay whole, as the height and width of images do.
    """
    rows = tuple(_axes('batch', mesh, rules)) or None
    positions = (tuple(_axes('length', mesh, rules)) or None) if rank == 2 else None
    return NamedSharding(mesh, PartitionSpec(rows, positions) if positions else PartitionSpec(rows))


def batch_shardings(batch: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Returns the sharding of each array of a batch (arrays or shapes).

    Raises:
      UserError: for a length which does not divide into the sequence devices.
    """
    devices = math.prod(_axes('length', mesh, rules).values())

    def one(array):
        if len(array.shape) == 2 and array.shape[1] % devices:
            width = array.shape[1]
            raise UserError(
                f'a row of {width} positions does not divide into {devices} sequence devices; choose lengths '
                f'(data.source_length, data.target_length) which are multiples of {devices}, or another mesh.sequence'
            )
        return batch_sharding(mesh, len(array.shape), rules)

    return jax.tree.map(one, batch)


class Share(NamedTuple):
    """Part `index` of `count` equal parts of a batch's rows, in their order."""

    index: int
    count: int


def row_share(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Share:
    """Returns which rows of every batch this process reads: those which its devices hold.

    Processes whose devices hold the same rows, because a tensor or sequence axis runs across them, read the same.

    Raises:
      UserError: if this process's devices hold no whole part of the rows.
    """
    devices = row_devices(mesh, rules)
    places = batch_sharding(mesh, 1, rules).addressable_devices_indices_map((devices,))
    held = sorted({index[0].indices(devices)[0] for index in places.values()} if devices > 1 else {0})
    if devices == 1:
        return Share(0, 1)
    own = len(held)
    if held != list(range(held[0], held[0] + own)) or devices % own or held[0] % own:
        raise UserError(
            f'the devices of process {jax.process_index()} hold the parts {held} of {devices} of a batch, which is no '
            'whole share; put the axes which split rows (data, fsdp, expert) outermost over processes'
        )
    return Share(held[0] // own, devices // own)


def place_batch(batch: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Puts this process's rows of a batch on its devices; the result is one global batch over all processes.

    Args:
      batch: tree of numpy arrays, each with the rows of this process's `row_share` first.

    Raises:
      UserError: if the rows of all processes together do not divide, or a length does not.
    """
    share = row_share(mesh, rules)
    for rows in sorted({array.shape[0] for array in jax.tree.leaves(batch)}):
        check_batch(rows * share.count, mesh, rules)

    def place(array, sharding):
        array = np.asarray(array)
        first = share.index * array.shape[0]

        def part(index):
            start, stop, _ = index[0].indices(array.shape[0] * share.count)
            return array[(slice(start - first, stop - first), *index[1:])]

        return jax.make_array_from_callback((array.shape[0] * share.count, *array.shape[1:]), sharding, part)

    return jax.tree.map(place, batch, batch_shardings(batch, mesh, rules))
