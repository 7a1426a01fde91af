"""One mesh of devices with five named axes, any of which may have size 1."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from transformer_jax.errors import UserError, choose
from transformer_jax.sharding.rules import MESH_AXES, Rules, parse_rules

_logger = logging.getLogger(__name__)

LAYOUTS = ('sizes', 'auto')

AUTO_SHARE = 0.5
"""Share of a device's memory which parameters and optimizer state may take before 'auto' splits them further."""

Need = Callable[[AbstractMesh], int]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each kind of parallelism takes; -1, at most once, takes what is left over.

    Attributes:
      data: rows of the batch, parameters copied (data parallel).
      fsdp: rows of the batch, parameters and optimizer state split too (FSDP, ZeRO-3).
      tensor: heads, FFN width and vocabulary.
      sequence: positions of long inputs (context parallel).
      expert: experts of a mixture; rows of the batch elsewhere.
      layout: 'sizes', as they are given; or 'auto', which leaves tensor, sequence and expert as they are given and
        chooses data and fsdp for the devices present, see `auto_sizes`.
      rules: changes of the rules from logical axes to mesh axes, such as 'kv_heads=none,vocab=tensor+fsdp'.
      replicated_mib: a parameter above this size which no axis splits is refused where the mesh could split it.

    Raises:
      UserError: for a size of 0 or below -1, two sizes of -1, or a rule for unknown names.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    layout: str = 'sizes'
    rules: str = ''
    replicated_mib: float = 64.0

    def __post_init__(self) -> None:
        choose('mesh.layout', self.layout, LAYOUTS)
        sizes = {name: getattr(self, name) for name in MESH_AXES}
        for name, size in sizes.items():
            if size < -1 or size == 0:
                raise UserError(f'mesh.{name} = {size} is no number of devices; choose 1 or more, or -1 for the rest')
        open_axes = [name for name in ('data', 'fsdp', 'tensor', 'sequence', 'expert') if sizes[name] == -1]
        if len(open_axes) > 1:
            raise UserError(f'mesh.{" and mesh.".join(open_axes)} are -1; only one axis can take what is left over')
        if self.layout == 'auto' and (self.data, self.fsdp) != (-1, 1):
            raise UserError(
                f"mesh.layout = 'auto' chooses mesh.data and mesh.fsdp itself; leave them out, or set layout = 'sizes' "
                f'(they are {self.data} and {self.fsdp})'
            )
        if self.replicated_mib <= 0:
            raise UserError(f'mesh.replicated_mib = {self.replicated_mib} must be above 0')
        parse_rules(self.rules)

    @property
    def logical_rules(self) -> Rules:
        """The rules from logical axes to mesh axes."""
        return parse_rules(self.rules)

    @property
    def replicated_limit_bytes(self) -> int:
        """`replicated_mib` in bytes."""
        return round(self.replicated_mib * 2**20)

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


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None, need: Need | None = None) -> Mesh:
    """Returns the mesh over `devices` (default: all of every process), laid out along the machine's own topology.

    Args:
      need: for layout 'auto', see `auto_sizes`; without it nothing has to fit, and rows take all devices left over.

    Raises:
      UserError: if the sizes do not multiply to the number of devices, or 'auto' finds none which fit.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = config.shape(len(devices))
    if config.layout == 'auto' and need is not None:
        shape = auto_sizes(shape, need, device_bytes(devices[0]))
        _logger.info('mesh layout auto: data %d x fsdp %d', shape['data'], shape['fsdp'])
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def auto_sizes(shape: dict[str, int], need: Need, memory: int) -> dict[str, int]:
    """Returns `shape` with its data axis dealt out to data and fsdp: the least fsdp with which the state fits.

    Copied parameters communicate least, so they are split only as far as memory asks: until they take no more than
    half of a device, which leaves the rest to gradients and activations.

    Args:
      shape: {axis: size}, fsdp 1.
      need: bytes per device of parameters and optimizer state on a mesh; UserError where they do not divide.
      memory: bytes of a device.

    Raises:
      UserError: naming the least bytes per device, if they exceed a device's memory.
    """
    least, left = None, shape['data']
    for fsdp in (size for size in range(1, left + 1) if left % size == 0):
        sizes = {**shape, 'data': left // fsdp, 'fsdp': fsdp}
        try:
            needed = need(AbstractMesh(tuple(sizes.values()), tuple(sizes)))
        except UserError:
            if fsdp == 1:
                raise
            continue
        if needed <= AUTO_SHARE * memory:
            return sizes
        if least is None or needed < least[0]:
            least = needed, sizes
    if least[0] > memory:
        raise UserError(
            f'parameters and optimizer state need {least[0]:,} bytes per device even with mesh.fsdp = '
            f'{least[1]["fsdp"]}, and a device has {memory:,}; use more devices, mesh.tensor, or a smaller model'
        )
    return least[1]


def device_bytes(device: jax.Device) -> int:
    """Returns the memory of a device in bytes; of a CPU device, this process's part of the machine's memory."""
    stats = device.memory_stats()
    if stats and 'bytes_limit' in stats:
        return stats['bytes_limit']
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // jax.local_device_count()
