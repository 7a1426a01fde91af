"""Arrays to disk and back through orbax: the only file which imports it.

On disk each array is a zarr folder of its own, named by its path (`params.encoder.layers.mlp.kernel`), uncompressed:
weights hardly shrink, and compression triples the time of a save.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from transformer_jax.checkpoints import names

# What orbax logs in vain: at every save that there are no OCDBT files, which is how we want it, and at a failed save
# two tracebacks of the error which `Writer.wait` raises.
_IN_VAIN = ('Skipping merge of OCDBT', '_SignalingThread.run() raised', 'Handler Commit operations or the Commit')
logging.getLogger('absl').addFilter(lambda record: not any(text in str(record.msg) for text in _IN_VAIN))


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)


class Writer:
    """Saves named arrays in the background; every process of a run makes the same calls."""

    def __init__(self, timeout_seconds: int) -> None:
        self._checkpointer = ocp.AsyncCheckpointer(
            _handler(), async_options=ocp.options.AsyncOptions(timeout_secs=timeout_seconds)
        )

    def save(self, folder: epath.Path, leaves: Mapping[str, Any]) -> None:
        """Starts writing {name: array} to `folder`; returns when the values are held on the host.

        The arrays may be donated or overwritten afterwards.
        """
        arrays = {name: _to_storable(leaf) for name, leaf in leaves.items()}
        self._checkpointer.save(folder, args=ocp.args.PyTreeSave(names.nest(arrays)))

    def wait(self) -> None:
        """Blocks until the arrays are on disk; raises what went wrong in the background."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Waits and ends the background threads."""
        self._checkpointer.close()


def read(folder: epath.Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Reads named arrays, each straight into the sharding asked for.

    Args:
      folder: where `Writer.save` put them.
      targets: {name: ShapeDtypeStruct}, shape and dtype as saved; `sharding=None` asks for a numpy array on the host.

    Returns:
      {name: array}. Shardings of the saving run are never looked at.
    """
    if not targets:
        return {}
    stored = {name: names.storable(target) for name, target in targets.items()}
    arguments = {name: _restore_argument(struct) for name, struct in stored.items()}
    checkpointer = ocp.Checkpointer(_handler())
    tree = checkpointer.restore(
        folder,
        args=ocp.args.PyTreeRestore(item=names.nest(stored), restore_args=names.nest(arguments), partial_restore=True),
    )
    checkpointer.close()
    arrays = names.named_leaves(tree)
    return {name: _from_storable(arrays[name], target) for name, target in targets.items()}


def _restore_argument(struct: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    if struct.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=struct.dtype)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=struct.sharding, global_shape=struct.shape, dtype=struct.dtype
    )


def _to_storable(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if names.is_key(leaf) else leaf


def _from_storable(array: Any, target: Any) -> Any:
    if not names.is_key(target):
        return array
    implementation = names.key_implementation(target)
    wrap = jax.jit(lambda data: jax.random.wrap_key_data(data, impl=implementation), out_shardings=target.sharding)
    return wrap(array)
