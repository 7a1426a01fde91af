"""Rows of a batch over devices."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.sharding.rules import DEFAULT_RULES, Rules


def _row_axes(mesh: Mesh, rules: Rules) -> dict[str, int]:
    return {axis: mesh.shape[axis] for axis in rules['batch'] if mesh.shape[axis] > 1}


def check_batch(rows: int, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> None:
    """Checks that every device gets the same number of rows.

    Raises:
      UserError: in words, with the nearest numbers of rows which would do.
    """
    axes = _row_axes(mesh, rules)
    devices = math.prod(axes.values())
    if rows % devices or rows < 1:
        shown = ' x '.join(f'{axis} {size}' for axis, size in axes.items())
        below, above = rows // devices * devices, (rows // devices + 1) * devices
        choices = f'{below} or {above}' if below > 0 else f'{above}'
        raise UserError(
            f'a batch of {rows} rows does not divide into {devices} data devices ({shown or "one device"}); '
            f'choose {choices} rows, or another mesh'
        )


def batch_sharding(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> NamedSharding:
    """Returns the sharding of any array whose first dimension is B; other dimensions stay whole."""
    axes = tuple(_row_axes(mesh, rules))
    return NamedSharding(mesh, PartitionSpec(axes) if axes else PartitionSpec())


def place_batch(batch: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Puts this process's rows of a batch on its devices; the result is one global batch over all processes.

    Args:
      batch: tree of numpy arrays, each with this process's rows first.

    Raises:
      UserError: if the rows of all processes together do not divide.
    """
    sharding = batch_sharding(mesh, rules)
    for rows in sorted({array.shape[0] for array in jax.tree.leaves(batch)}):
        check_batch(rows * jax.process_count(), mesh, rules)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), batch)
