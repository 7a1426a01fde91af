"""Searches on a mesh: rows over its devices, answers back on every host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.sharding import batch_sharding, constrain, row_devices


def place_rows(inputs: Any, mesh: Mesh | None) -> Any:
    """Returns the arguments of a search on the mesh of its parameters, rows split as those of a training batch are.

    Rows which do not divide are filled up with copies of the last one: answers depend on their own row only, so the
    caller cuts the copies' answers off. Every process gives the same arguments.
    """
    if mesh is None:
        return inputs
    parts = row_devices(mesh)

    def place(x):
        if np.ndim(x) == 0:
            return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
        rows = np.pad(x, [(0, -len(x) % parts)] + [(0, 0)] * (np.ndim(x) - 1), mode='edge')
        return jax.device_put(rows, batch_sharding(mesh, 1))

    return jax.tree.map(place, inputs)


def on_every_host(tree: Any) -> Any:
    """Returns the tree with each array whole on every device, inside `tracing_on`."""
    return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), tree)
