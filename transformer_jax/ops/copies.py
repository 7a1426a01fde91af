"""A matrix with several uses, of which each device has a copy: its gradient is summed there before it is reduced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.sharding.activations import axes_of, current_mesh


class Copies(NamedTuple):
    """A matrix for each part of the tokens.

    Attributes:
      each: E_p = E, (P, *shape); p = r Q + q is the part of rows r of R and positions q of Q.
      parts: R and Q; axes: the mesh axes which split a batch into them.
    """

    each: jax.Array
    parts: tuple[int, int]
    axes: tuple[str, ...]


def copy_to_parts(matrix: jax.Array, names: tuple[str, ...]) -> Copies | None:
    """Returns E_p = E for each part p of the tokens, laid where those tokens are.

    dL/dE = sum_p sum_u dL/dE_pu: the sum over the uses u of a copy is of arrays which lie on one device, so that one
    all-reduce, over p, is left. Of one matrix XLA would reduce the gradient of each use, but for lookups which it
    merges. A copy takes no memory, for a device holds the matrix already.

    None where there is nothing to gain: on one device, and where a mesh axis splits both tokens and the matrix (FSDP),
    whose gradient is then scattered.

    Args:
      names: logical axes of the matrix.
    """
    mesh = current_mesh()
    if mesh is None:
        return None
    # Parameters divide, or are refused; whether tokens do is known when a copy is used.
    rows, positions = (axes_of(name, 0, mesh) for name in ('batch', 'length'))
    layout = [axes_of(name, size, mesh) for name, size in zip(names, matrix.shape, strict=True)]
    if not rows + positions or set(rows + positions).intersection(sum(layout, ())):
        return None
    R, Q = (math.prod(mesh.shape[axis] for axis in split) for split in (rows, positions))
    copies = jnp.broadcast_to(matrix, (R * Q, *matrix.shape))
    spec = PartitionSpec(rows + positions, *(axes or None for axes in layout))
    return Copies(jax.lax.with_sharding_constraint(copies, spec), (R, Q), rows + positions)


def divides(copies: Copies, x_BT: jax.Array) -> bool:
    """Returns whether the rows and positions of an array divide over the parts."""
    return all(size % parts == 0 for size, parts in zip(x_BT.shape, copies.parts, strict=False))


def use_copies(use: Callable[[jax.Array, jax.Array], jax.Array], copies: Copies, x_BT: jax.Array) -> jax.Array:
    """Returns use(E, x), (B, T, ...): each part of x with its own copy of E.

    Args:
      use: acts on each token by itself.
      x_BT: (B, T, ...), whose rows and positions divide over the parts.
    """
    (R, Q), (B, T, *rest) = copies.parts, x_BT.shape
    x_Pbt = jnp.moveaxis(x_BT.reshape(R, B // R, Q, T // Q, *rest), 2, 1).reshape(R * Q, B // R, T // Q, *rest)
    x_Pbt = jax.lax.with_sharding_constraint(x_Pbt, PartitionSpec(copies.axes))
    y_Pbt = jax.vmap(use)(copies.each, x_Pbt)
    y_RQbt = y_Pbt.reshape(R, Q, *y_Pbt.shape[1:])
    return jnp.moveaxis(y_RQbt, 1, 2).reshape(B, T, *y_Pbt.shape[3:])
