"""Flags of a run in several processes, and their start."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from absl import flags

from experiments import common
from transformer_jax.sharding import distributed

flags.DEFINE_string('coordinator', None, 'host:port of process 0; not needed on TPU pods, SLURM, GKE and Open MPI')
flags.DEFINE_integer('process_id', None, 'number of this process, from 0; goes with --coordinator')
flags.DEFINE_integer('process_count', None, 'number of processes; goes with --coordinator')
flags.DEFINE_float('start_timeout', 300.0, 'seconds to wait for the other processes', lower_bound=0.1)


def join(logs: TextIO | None = None) -> TextIO:
    """Joins this process to the others, where there are any, and returns where it speaks: nowhere but in the first.

    Args:
      logs: where the roll call is reported (None: standard output).

    Raises:
      UserError: naming the processes which did not come.
    """
    values = flags.FLAGS
    common.show_logs(lambda text: print(text, file=logs, flush=True))
    joined = distributed.start(values.coordinator, values.process_id, values.process_count, values.start_timeout)
    return sys.stdout if joined is None or joined.index == 0 else open(os.devnull, 'w')
