"""A small training state for checkpoint tests, and where its arrays lie on a mesh."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@flax.struct.dataclass
class State:
    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any
    key: jax.Array


def make_params(seed: int = 0, width: int = 8, layers: int = 2) -> dict[str, Any]:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    blocks = {
        f'layers_{i}': {'mlp': {'kernel': normal(width, 16), 'bias': normal(16).astype(jnp.bfloat16)}}
        for i in range(layers)
    }
    return {'encoder': blocks, 'embedding': normal(24, width)}


def make_state(seed: int = 0, step: int = 7, ema: bool = True, width: int = 8, layers: int = 2) -> State:
    params = make_params(seed, width, layers)
    gradients = make_params(seed + 100, width, layers)
    return _make(params, gradients, step, seed + 3, ema=ema)


@functools.partial(jax.jit, static_argnames='ema')
def _make(params: Any, gradients: Any, step: jax.Array, seed: jax.Array, *, ema: bool) -> State:
    _, opt_state = OPTIMIZER.update(gradients, OPTIMIZER.init(params), params)
    halves = jax.tree.map(lambda leaf: leaf / 2, params) if ema else None
    return State(jnp.int32(step), params, opt_state, halves, jax.random.key(seed))


def make_mesh(*shape: int) -> Mesh:
    count = int(np.prod(shape))
    return jax.make_mesh(shape, ('rows', 'columns'), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:count])


def place(mesh: Mesh | None, state: Any) -> Any:
    """Returns the state as ShapeDtypeStructs: matrices over both axes of the mesh, the rest whole; None means host."""

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = None
        if mesh is not None:
            sharding = NamedSharding(mesh, PartitionSpec('rows', 'columns') if leaf.ndim == 2 else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(struct, state)


def put(mesh: Mesh, state: Any) -> Any:
    return jax.tree.map(lambda leaf, struct: jax.device_put(leaf, struct.sharding), state, place(mesh, state))


def raw(leaf: Any) -> np.ndarray:
    """Returns the bytes of an array or a random key as integers, so that equal means bit-equal."""
    array = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
    return np.frombuffer(array.tobytes(), np.uint8)


def assert_bit_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, path
        np.testing.assert_array_equal(raw(a), raw(b), err_msg=jax.tree_util.keystr(path))
