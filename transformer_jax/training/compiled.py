"""Compilation ahead of time: every shape is compiled by name before it runs, and nothing is compiled in silence."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import jax

from transformer_jax.sharding import mesh_of

_logger = logging.getLogger(__name__)


# Left alone, libtpu turns gathers and scatters over a torus of three dimensions into all-reduces, which send twice as
# much; scatters over three dimensions it has on the sparse cores only.
_TPU_OPTIONS = {
    'xla_tpu_prefer_async_allgather_to_allreduce': 'true',
    'xla_enable_async_all_gather': 'true',
    'xla_tpu_enable_async_collective_fusion': 'true',
    'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
    'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter': 'true',
    'xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter': 'true',
    # Else only shards whose size has a large power of two are scattered: not those of a feed-forward layer of 11,008.
    'xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer': 'false',
}


def compiler_options(mesh: jax.sharding.Mesh | None) -> dict[str, str]:
    """Returns the options of XLA with which programs for a mesh are compiled (None: none)."""
    return dict(_TPU_OPTIONS) if mesh is not None and mesh.devices.flat[0].platform == 'tpu' else {}


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What one compilation cost and needs: seconds, bytes on each device, and floating-point operations a call.

    `flops` is the compiler's own count and 0 where the backend gives none; it counts the body of a scan once.
    """

    seconds: float
    argument_bytes: int
    temporary_bytes: int
    flops: float


class AheadOfTime:
    """A jitted function which runs only for shapes compiled beforehand.

    Calling it with any other shape raises, so that a retrace cannot happen unseen.
    """

    def __init__(self, name: str, function: Callable[..., Any], keyed_by: int):
        """`function` is jitted; the shapes of its positional argument `keyed_by` choose the program."""
        self.name = name
        self._function = function
        self._keyed_by = keyed_by
        self._programs: dict[Any, Any] = {}
        self.reports: dict[Any, CompileReport] = {}

    def compile(self, *arguments: Any) -> CompileReport:
        """Compiles for these arguments, arrays or `jax.ShapeDtypeStruct`s with shardings, and logs what it took."""
        start = time.perf_counter()
        program = self._function.lower(*arguments).compile(compiler_options=compiler_options(mesh_of(arguments)))
        seconds = time.perf_counter() - start
        memory, cost = program.memory_analysis(), program.cost_analysis()
        report = CompileReport(
            seconds=seconds,
            argument_bytes=memory.argument_size_in_bytes if memory else 0,
            temporary_bytes=memory.temp_size_in_bytes if memory else 0,
            flops=cost.get('flops', 0.0) if cost else 0.0,
        )
        key = shape_key(arguments[self._keyed_by])
        self._programs[key], self.reports[key] = program, report
        _logger.info(
            'compiled %s for %s in %.1f s: %.1f MiB of arguments, %.1f MiB of temporaries a device',
            self.name, describe(arguments[self._keyed_by]), seconds,
            report.argument_bytes / 2**20, report.temporary_bytes / 2**20,
        )  # fmt: skip
        return report

    @property
    def compilations(self) -> int:
        """How many programs there are."""
        return len(self._programs)

    def __call__(self, *arguments: Any) -> Any:
        key = shape_key(arguments[self._keyed_by])
        if key not in self._programs:
            raise RuntimeError(
                f'{self.name} was not compiled for {describe(arguments[self._keyed_by])}; '
                f'compiled: {"; ".join(describe_key(known) for known in self._programs) or "nothing"}'
            )
        return self._programs[key](*arguments)


def shape_key(tree: Any) -> tuple:
    """Returns names, shapes and types of a tree's leaves, hashable."""
    return tuple(
        (jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )


def describe_key(key: tuple) -> str:
    """Returns the distinct shapes in `key` for a message."""
    return ', '.join(sorted({'x'.join(map(str, shape)) for _, shape, _ in key}))


def describe(tree: Any) -> str:
    """Returns the distinct shapes of a tree's leaves for a message."""
    return describe_key(shape_key(tree))
