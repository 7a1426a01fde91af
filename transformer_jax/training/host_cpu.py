"""What makes a process quicker whose device is the host's CPU; programs ask for it before anything else."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = 2**31 - 1
_EXTRA = '--xla_backend_extra_options='
_FUSION = 'xla_cpu_use_multi_output_fusion'


def tune_host_cpu() -> bool:
    """Tunes memory and compiler for a CPU, before other threads begin and anything is compiled; returns whether it did.

    Freed memory is kept (`keep_freed_memory`), and XLA may fuse what has several results, without which it copies much
    of Adam's moments before it updates them. Nothing is done where JAX has a plugin for accelerators.
    """
    if importlib.metadata.entry_points(group='jax_plugins') or importlib.util.find_spec('libtpu') is not None:
        return False
    given = os.environ.get('XLA_FLAGS', '')
    if _EXTRA not in given:
        os.environ['XLA_FLAGS'] = f'{given} {_EXTRA}{_FUSION}'.strip()
    keep_freed_memory()
    return True


def keep_freed_memory() -> bool:
    """Lets this process keep memory which is freed, instead of giving it back to the system; returns whether it does.

    XLA on CPU takes its temporaries anew at each step, and glibc maps memory of that size from the system each time,
    which clears it page by page: a tenth to a fifth of a step's time. Kept, the heap may grow to twice the temporaries.
    It does nothing where the C library is not glibc.
    """
    if not sys.platform.startswith('linux'):
        return False
    set_option = getattr(ctypes.CDLL(None), 'mallopt', None)
    if set_option is None:
        return False
    options = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    return all([set_option(name, value) for name, value in options])
