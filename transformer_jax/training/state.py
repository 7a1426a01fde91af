"""The state of a run: built abstractly, then made or restored straight into its shardings."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec


@flax.struct.dataclass
class TrainState:
    """Everything that changes from step to step.

    `step` counts batches taken, so it is also the position in the data; `skipped` counts those whose loss or
    gradient was not finite, so step - skipped updates were made; `skipped_in_row` counts the last unbroken run.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any
    skipped: jax.Array
    skipped_in_row: jax.Array


def new_state(params: Any, optimizer: optax.GradientTransformation, ema: bool = False) -> TrainState:
    """Returns the state before the first step; the moving average starts at the parameters."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        # A copy, since the train step donates its state and one buffer cannot be donated twice.
        ema=jax.tree.map(jnp.copy, params) if ema else None,
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_row=jnp.zeros((), jnp.int32),
    )


def abstract_state(abstract_params: Any, optimizer: optax.GradientTransformation, ema: bool = False) -> TrainState:
    """Returns the state as shapes and types; nothing is computed."""
    return jax.eval_shape(lambda params: new_state(params, optimizer, ema), abstract_params)


def state_shardings(abstract: TrainState, param_shardings: Any, replicated: jax.sharding.Sharding) -> TrainState:
    """Returns a sharding for each leaf: moments and averages lie as their parameter does, the rest everywhere.

    A leaf at a parameter's place whose size differs along some axes, such as a number for each block, lies as the
    parameter does along the others.
    """
    by_path = {
        jax.tree_util.keystr(path): sharding for path, sharding in jax.tree_util.tree_leaves_with_path(param_shardings)
    }
    shapes = {
        jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.params)
    }

    def place(path, leaf):
        for start in range(len(path)):
            name = jax.tree_util.keystr(path[start:])
            if name in by_path and len(shapes[name]) == len(leaf.shape):
                return _along_equal_axes(by_path[name], shapes[name], leaf.shape)
        return replicated

    return jax.tree_util.tree_map_with_path(place, abstract)


def _along_equal_axes(sharding: jax.sharding.Sharding, shape: tuple[int, ...], own: tuple[int, ...]):
    if shape == own or not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    kept = (entry if size == mine else None for entry, size, mine in zip(spec, shape, own, strict=True))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def init_state(
    init_params: Any,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    ema: bool = False,
    shardings: TrainState | None = None,
) -> TrainState:
    """Returns a fresh state from `init_params(key)`, each array created on the devices which will hold it."""
    make = jax.jit(lambda key: new_state(init_params(key), optimizer, ema), out_shardings=shardings)
    return make(key)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Returns the abstract tree with a sharding on each leaf, as ahead-of-time compilation and restoring need it."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )
