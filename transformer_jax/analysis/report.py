"""What one compiled program costs one chip, and tables of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from transformer_jax.analysis.chips import Chip
from transformer_jax.analysis.hlo import COLLECTIVES

_UNITS = (2**30, 'GiB'), (2**20, 'MiB'), (2**10, 'KiB')


@dataclasses.dataclass(frozen=True)
class Report:
    """What one program costs one chip. Bytes and FLOPs are those of one call.

    Attributes:
      program: 'train', 'prefill' or 'decode'; mesh: axes above 1; rows, lengths: of its batch, all chips together.
      compile_seconds: the compilation took.
      parameter_bytes, optimizer_bytes: as they are kept; cache_bytes: of decoding.
      temporary_bytes, peak_bytes: during the call, the peak with everything in it.
      model_flops: products outside attention: forward, and for training twice that backward; no recomputation.
      attention_flops: the same of attention, over the pairs which its masks show.
      compiled_flops: products of the compiled program outside kernels.
      kernel_flops: of kernels, by formula; kernel_recomputed_flops: what of it a backward pass computes again.
      kernels: runs of each kernel.
      sent_bytes: by each kind of collective, as rings send them; least_bytes: what this sharding needs, by its purpose.
      largest: the largest collectives, each (kind, bytes, devices in a group, runs, where it comes from).
      unbounded_loops: loops whose number of steps the compiler does not know; their bodies count once.
      compute_seconds, memory_seconds, link_seconds: lower bounds by the chip's published rates.
    """

    program: str
    topology: str
    chip: Chip
    mesh: dict[str, int]
    rows: int
    lengths: tuple[int, ...]
    compile_seconds: float
    parameter_bytes: int
    optimizer_bytes: int
    cache_bytes: int
    temporary_bytes: int
    peak_bytes: int
    model_flops: float
    attention_flops: float
    compiled_flops: float
    kernel_flops: float
    kernel_recomputed_flops: float
    kernels: dict[str, int]
    sent_bytes: dict[str, float]
    least_bytes: dict[str, float]
    largest: tuple[tuple[str, float, int, int, str], ...]
    unbounded_loops: int
    memory_seconds: float

    @property
    def fits(self) -> bool:
        """Whether the peak is within the chip's memory."""
        return self.peak_bytes <= self.chip.hbm_bytes

    @property
    def flops_ratio(self) -> float:
        """Compiled over model FLOPs; attention is in both where no kernel computes it, else in neither."""
        attention = 0.0 if self.kernels else self.attention_flops
        return self.compiled_flops / (self.model_flops + attention)

    @property
    def bytes_ratio(self) -> float:
        """Bytes sent over the least, NaN where nothing has to be sent."""
        least = sum(self.least_bytes.values())
        return sum(self.sent_bytes.values()) / least if least else math.nan

    @property
    def compute_seconds(self) -> float:
        """Lower bound: all FLOPs at the chip's peak."""
        return (self.compiled_flops + self.kernel_flops) / self.chip.flops

    @property
    def link_seconds(self) -> float:
        """Lower bound: all bytes over all links at once."""
        return sum(self.sent_bytes.values()) / self.chip.link_rate

    @property
    def step_seconds(self) -> float:
        """Estimate: the slowest of compute, memory and links, as if they overlapped perfectly at published rates."""
        return max(self.compute_seconds, self.memory_seconds, self.link_seconds)

    @property
    def mfu(self) -> float:
        """Estimate: model FLOPs over the chip's in `step_seconds` (Chowdhery et al. 2022, appendix B)."""
        return (self.model_flops + self.attention_flops) / (self.step_seconds * self.chip.flops)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, the derived figures in it."""
        derived = ('fits', 'flops_ratio', 'bytes_ratio', 'compute_seconds', 'link_seconds', 'step_seconds', 'mfu')
        fields = dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
        return fields | {'chip': self.chip.name, 'hbm_bytes': self.chip.hbm_bytes}

    def lines(self) -> list[tuple[str, str]]:
        """Returns the report as (name, value) for reading."""
        peak, hbm = self.peak_bytes, self.chip.hbm_bytes
        rows = [
            ('program', f'{self.program}, {self.rows} rows of {" + ".join(map(str, self.lengths))} on {self.topology}'),
            ('mesh', mesh_text(self.mesh)),
            ('parameters', _size(self.parameter_bytes)),
            ('optimizer state', _size(self.optimizer_bytes)),
            ('cache', _size(self.cache_bytes)),
            ('temporaries', _size(self.temporary_bytes)),
            ('peak', f'{_size(peak)} of {_size(hbm)}: {"fits" if self.fits else "DOES NOT FIT"}'),
            ('model FLOPs', f'{_tera(self.model_flops)}, and {_tera(self.attention_flops)} in attention'),
            ('compiled FLOPs', f'{_tera(self.compiled_flops)} outside kernels, {self.flops_ratio:.3f} x the model'),
            ('kernel FLOPs', f'{_tera(self.kernel_flops)} by formula; {self._kernels()}'),
            ('recomputed in kernels', _tera(self.kernel_recomputed_flops)),
        ]
        sent = self.sent_bytes
        rows += [(f'sent by {kind}', _size(sent[kind])) for kind in COLLECTIVES if kind in sent]
        rows += [(f'least for {name}', _size(size)) for name, size in self.least_bytes.items()]
        rows.append(('sent in all', f'{_size(sum(sent.values()))}, {self.bytes_ratio:.3f} x the least'))
        bounds = f'compute {self.compute_seconds:.4g}, memory {self.memory_seconds:.4g}, links {self.link_seconds:.4g}'
        rows.append(('step time (estimate)', f'{self.step_seconds:.4g} s by published rates: {bounds}'))
        rows.append(('MFU (estimate)', f'{self.mfu:.3f}'))
        if self.unbounded_loops:
            rows.append(('loops of unknown length', f'{self.unbounded_loops}; their bodies count once'))
        rows.append(('compiled in', f'{self.compile_seconds:.0f} s'))
        return [(name, value) for name, value in rows if value != _size(0)]

    def _kernels(self) -> str:
        return ', '.join(f'{name} x {runs}' for name, runs in sorted(self.kernels.items())) or 'none runs'


def mesh_text(mesh: dict[str, int]) -> str:
    """Returns a mesh as words, such as 'fsdp 64 x tensor 4'."""
    return ' x '.join(f'{axis} {size}' for axis, size in mesh.items() if size > 1) or 'one chip'


def _size(size: float) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit / 10), _UNITS[-1])
    return f'{size / unit:.3f} {name}'


def _tera(flops: float) -> str:
    return f'{flops / 1e12:.3f} TFLOP'


def full_text(report: Report) -> str:
    """Returns the whole report of one program, one line for each figure."""
    lines = report.lines()
    width = max(len(name) for name, _ in lines)
    shown = [f'{name:<{width}}  {value}' for name, value in lines]
    for kind, size, group, runs, source in report.largest:
        shown.append(f'    {_size(size)} {kind} in groups of {group}, {runs} times: {source}')
    return '\n'.join(shown)


def table(reports: Sequence[Report]) -> str:
    """Returns one row for each report: the columns by which meshes are compared. All times are estimates."""
    cells = [('mesh', 'peak', 'fits', 'FLOPs / model', 'sent', 'sent / least', 'step', 'MFU')]
    for report in reports:
        cells.append(
            (
                mesh_text(report.mesh),
                _size(report.peak_bytes),
                'yes' if report.fits else 'no',
                f'{report.flops_ratio:.3f}',
                _size(sum(report.sent_bytes.values())),
                f'{report.bytes_ratio:.3f}',
                f'{report.step_seconds:.4g} s',
                f'{report.mfu:.3f}',
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                     for line in cells)  # fmt: skip
