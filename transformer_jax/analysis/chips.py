"""Chips by name, with the rates which their maker publishes, and topologies of them without any hardware."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence

import jax

from transformer_jax.errors import UserError, choose


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published rates of one chip (cloud.google.com/tpu/docs/v5e, v5p and v6e).

    Attributes:
      flops: bf16 operations a second; hbm_bytes: memory; hbm_rate: its bytes a second.
      link_rate: bytes a second which leave the chip over all its links, half of the published two-way rate.
      accelerator: how an accelerator type is named, with the number which its name counts per chip.
    """

    name: str
    flops: float
    hbm_bytes: int
    hbm_rate: float
    link_rate: float
    accelerator: tuple[str, int]


CHIPS = {
    'v5e': Chip('v5e', 197e12, 16 * 10**9, 819e9, 200e9, ('v5litepod', 1)),
    'v5p': Chip('v5p', 459e12, 95 * 2**30, 2765e9, 600e9, ('v5p', 2)),
    'v6e': Chip('v6e', 918e12, 32 * 10**9, 1638e9, 400e9, ('v6e', 1)),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips in a grid, such as 'v5e:16x16'."""

    name: str
    chip: Chip
    chips: int


def parse_topology(name: str) -> Topology:
    """Returns what a name such as 'v5e:16x16' means.

    Raises:
      UserError: for another form, or an unknown chip.
    """
    match = re.fullmatch(r'(\w+):(\d+(?:x\d+)*)', name)
    if match is None:
        raise UserError(f"--topology = '{name}' is no topology; write chip:grid, such as 'v5e:16x16' or 'v5p:4x4x4'")
    chip = CHIPS[choose('chip of --topology', match[1], CHIPS)]
    return Topology(name, chip, math.prod(int(size) for size in match[2].split('x')))


def topology_devices(topology: Topology) -> Sequence[jax.Device]:
    """Returns descriptions of the chips, for which programs can be compiled but not run.

    Raises:
      UserError: if libtpu is not installed, or does not know this grid.
    """
    from jax.experimental import topologies

    kind, per_chip = topology.chip.accelerator
    # What libtpu would ask the machine for, were it a TPU.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')  # no chip is opened, so several may compile at once
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', f'{kind}-{topology.chips * per_chip}')
    try:
        return topologies.get_topology_desc(platform='tpu', topology_name=topology.name).devices
    except Exception as error:  # libtpu raises several types
        if 'libtpu' in str(error) or isinstance(error, ImportError):
            raise UserError(f"compiling for TPUs needs libtpu: pip install -e '.[tpu]' ({error})") from error
        raise UserError(f"libtpu does not know the topology '{topology.name}': {error}") from error
