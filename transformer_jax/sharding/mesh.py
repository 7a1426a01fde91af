"""One mesh of devices with five named axes, any of which may have size 1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from transformer_jax.errors import UserError

MESH_AXES = ('data', 'fsdp', 'expert', 'sequence', 'tensor')
"""Outermost first: the axes which communicate most per step lie on neighbouring devices."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each kind of parallelism takes; -1, at most once, takes what is left over.

    Attributes:
      data: rows of the batch, parameters copied (data parallel).
      fsdp: rows of the batch, parameters and optimizer state split too (FSDP, ZeRO-3).
      tensor: heads, FFN width and vocabulary.
      sequence: positions of long inputs.
      expert: experts of a mixture; rows of the batch elsewhere.

    Raises:
      UserError: for a size of 0 or below -1, or two sizes of -1.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < -1 or size == 0:
                raise UserError(f'mesh.{name} = {size} is no number of devices; choose 1 or more, or -1 for the rest')
        open_axes = [name for name, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise UserError(f'mesh.{" and mesh.".join(open_axes)} are -1; only one axis can take what is left over')

    def shape(self, device_count: int) -> dict[str, int]:
        """Returns {axis: size} for `device_count` devices, outermost axis first.

        Raises:
          UserError: if the sizes do not multiply to the number of devices.
        """
        sizes = {name: getattr(self, name) for name in MESH_AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        shown = ' x '.join(f'{name} {size}' for name, size in sizes.items() if size not in (1, -1)) or 'all axes 1'
        open_axis = next((name for name, size in sizes.items() if size == -1), None)
        if open_axis is None and fixed != device_count:
            raise UserError(
                f'mesh {shown} needs {fixed} devices, but there are {device_count}; let the sizes multiply to '
                f'{device_count}, or set one to -1'
            )
        if open_axis is not None:
            if device_count % fixed:
                raise UserError(
                    f'mesh {shown} = {fixed} does not divide {device_count} devices, so nothing whole is left for '
                    f'{open_axis}; choose sizes whose product divides {device_count}'
                )
            sizes[open_axis] = device_count // fixed
        return sizes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over `devices` (default: all of every process), laid out along the machine's own topology.

    Raises:
      UserError: if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = config.shape(len(devices))
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape), devices=devices)
