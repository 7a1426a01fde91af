"""What a compiled program computes and communicates, read from its optimized HLO text.

XLA's own cost analysis counts the body of a loop once; here every instruction counts as often as it runs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

# Bytes which one device sends for a collective over a group of g, as a multiple of its operand's: the cost of a ring.
_RING = {
    'all-gather': lambda g: g - 1,
    'reduce-scatter': lambda g: (g - 1) / g,
    'all-reduce': lambda g: 2 * (g - 1) / g,
    'all-to-all': lambda g: (g - 1) / g,
    'ragged-all-to-all': lambda g: (g - 1) / g,
    'collective-permute': lambda g: 1,
    'collective-broadcast': lambda g: 1,
}
COLLECTIVES = tuple(_RING)

_WIDTHS = {'pred': 1, 's4': 0.5, 'u4': 0.5, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'f16': 2, 'bf16': 2, 's32': 4,
           'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8, 'c128': 16}  # fmt: skip
_ARRAY = re.compile(r'\b([a-z]+\d+[a-z0-9]*|pred|token)\[([\d,]*)\]')
_HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*->.*\{$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (.*)$')
_OPCODE = re.compile(r'\s*([\w\-]+)\(')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Array:
    """Type and shape of an array of the program."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> float:
        """Its size, padding of layouts not counted."""
        return math.prod(self.shape) * _WIDTHS.get(self.dtype, 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      results: its arrays, several for a tuple; operands: names of other instructions; attributes: the rest of the line.
      literal: what stands between the parentheses; is_root: whether it is the computation's result.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    literal: str
    is_root: bool

    def attribute(self, key: str) -> str | None:
        """Returns the word after `key=`, None without one."""
        match = re.search(rf'\b{key}=%?([\w.\-]+)', self.attributes)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, the one it begins with, and its number of devices."""

    computations: dict[str, list[Instruction]]
    entry: str
    devices: int

    def results(self) -> dict[str, tuple[Array, ...]]:
        """Returns the arrays of every instruction by its name."""
        return {line.name: line.results for lines in self.computations.values() for line in lines}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A communication of the program, with all its runs.

    Attributes:
      kind: one of `COLLECTIVES`; group: devices which take part together; runs: how often it runs in a call.
      bytes: what one device sends in all runs, by a ring; source: where in the model it comes from.
    """

    kind: str
    group: int
    runs: int
    bytes: float
    source: str


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one call costs each device.

    Attributes:
      flops: of dots and convolutions, two for each multiply-add, outside kernels.
      collectives: every communication; kernels: runs of each custom kernel by its name.
      unbounded: loops whose number of steps the compiler does not know; their bodies count once.
    """

    flops: int
    collectives: tuple[Collective, ...]
    kernels: dict[str, int]
    unbounded: tuple[str, ...]

    def bytes_by_kind(self) -> dict[str, float]:
        """Returns the bytes a device sends for each kind of collective."""
        totals: dict[str, float] = collections.defaultdict(float)
        for collective in self.collectives:
            totals[collective.kind] += collective.bytes
        return dict(totals)


def parse(text: str) -> Module:
    """Reads the text of an optimized module, as `compiled.as_text()` gives it.

    Raises:
      ValueError: if it has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, lines = None, []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif (match := _INSTRUCTION.match(line)) is not None:
            lines.append(_instruction(match[2], match[3], is_root=match[1] is not None))
    if entry is None:
        raise ValueError('the text has no ENTRY computation; it is no HLO module')
    header = text.split('\n', 1)[0]
    counts = [int(number) for number in re.findall(r'(?:num_partitions|replica_count)=(\d+)', header)]
    return Module(computations, entry, math.prod(counts))


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    rest = re.sub(r'/\*.*?\*/', '', rest)
    end = _closing(rest, 0) + 1 if rest.startswith('(') else rest.index(' ')
    result, rest = rest[:end], rest[end:]
    opcode = _OPCODE.match(rest)
    close = _closing(rest, opcode.end() - 1)
    literal = rest[opcode.end() : close]
    operands = tuple(re.findall(r'%([\w.\-]+)', literal))
    return Instruction(name, opcode[1], _arrays(result), operands, rest[close + 1 :], literal, is_root)


def _closing(text: str, start: int) -> int:
    """Returns where the parenthesis which opens at `start` closes."""
    depth = 0
    for match in re.compile(r'[()]').finditer(text, start):
        depth += 1 if match[0] == '(' else -1
        if not depth:
            return match.start()
    raise ValueError(f'an open parenthesis in {text[:80]}')


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(size) for size in dims.split(',') if size)) for dtype, dims in _ARRAY.findall(text)
    )


def costs(text: str) -> Costs:
    """Returns what one call of a compiled program costs each device, from its text.

    Bodies of loops count as often as they run, by the trip counts which the compiler notes (`known_trip_count`); of
    branches the one with most FLOPs counts.
    """
    module = parse(text)
    results = module.results()
    flops, collectives, kernels, unbounded = 0, [], collections.Counter(), []
    starts = _starts(module)
    begun = {line.attribute('channel_id') for name in starts for line in module.computations[name]} - {None}
    for line, runs, inside in _walk(module, module.entry, 1, unbounded):
        if line.opcode in ('dot', 'convolution'):
            flops += runs * _flops(line, results)
        elif line.opcode == 'custom-call' and 'custom_call_target="tpu_custom_call"' in line.attributes:
            kernels[re.sub(r'\.\d+$', '', line.name)] += runs
        elif (kind := line.opcode.removesuffix('-start')) in _RING:
            if line.attribute('channel_id') in begun and inside not in starts:
                continue  # goes on what another fusion began
            collectives.append(_collective(kind, line, runs, inside, results, module.devices))
    return Costs(flops, tuple(collectives), dict(kernels), tuple(unbounded))


def _starts(module: Module) -> set[str]:
    """Returns the computations which begin a collective that TPUs spread over fusions, each with a copy of it."""
    mark = 'custom_call_target="AsyncCollectiveStart"'
    return {name for name, lines in module.computations.items() if any(mark in line.attributes for line in lines)}


def _walk(
    module: Module, name: str, runs: int, unbounded: list[str], inside: str = ''
) -> Iterator[tuple[Instruction, int, str]]:
    """Yields each instruction, how often it runs, and the name of the computation it stands in."""
    for line in module.computations[name]:
        yield line, runs, name
        if line.opcode == 'while':
            trips = _trips(module, line)
            if trips is None:
                unbounded.append(line.name)
            yield from _walk(module, line.attribute('body'), runs * (trips or 1), unbounded, name)
        elif line.opcode in ('fusion', 'async-start'):
            yield from _walk(module, line.attribute('calls'), runs, unbounded, name)
        elif line.opcode in ('call', 'call-start'):  # the latter on sparse cores
            yield from _walk(module, line.attribute('to_apply'), runs, unbounded, name)
        elif line.opcode == 'conditional':
            yield from _walk(module, _dearest(module, line), runs, unbounded, name)


def _trips(module: Module, line: Instruction) -> int | None:
    """Returns how often a loop's body runs, None if the program does not say.

    Compilers for CPUs and GPUs note it. Those for TPUs do not, but leave `lax.scan` as it is: a counter from 0, or
    from 1 where they take out the first step, of which the condition is that it is below a constant.
    """
    noted = _TRIPS.search(line.attributes)
    if noted is not None:
        return int(noted[1])
    condition = {inner.name: inner for inner in module.computations[line.attribute('condition')]}
    root = next(inner for inner in condition.values() if inner.is_root)
    if root.opcode != 'compare' or root.attribute('direction') != 'LT':
        return None
    counter, limit = (condition[name] for name in root.operands)
    if counter.opcode != 'get-tuple-element' or limit.opcode != 'constant':
        return None
    everything = {inner.name: inner for lines in module.computations.values() for inner in lines}
    start = everything[everything[line.operands[0]].operands[int(counter.attribute('index'))]]
    while start.opcode in ('copy', 'bitcast'):
        start = everything[start.operands[0]]
    if start.opcode != 'constant' or start.literal not in ('0', '1'):
        return None
    return int(limit.literal) - int(start.literal)


def _dearest(module: Module, line: Instruction) -> str:
    listed = re.search(r'branch_computations=\{([^}]*)\}', line.attributes)
    names = listed[1] if listed else ' '.join(re.findall(r'(?:true|false)_computation=(%?[\w.\-]+)', line.attributes))
    results = module.results()

    def flops(name):
        walked = _walk(module, name, 1, [])
        return sum(runs * _flops(inner, results) for inner, runs, _ in walked if inner.opcode in ('dot', 'convolution'))

    return max(re.findall(r'[\w.\-]+', names), key=flops)


def _numbers(line: Instruction, key: str) -> list[int]:
    match = re.search(rf'\b{key}=\{{([\d,]*)\}}', line.attributes)
    return [int(number) for number in match[1].split(',') if number] if match else []


def _flops(line: Instruction, results: dict[str, tuple[Array, ...]]) -> int:
    left, right = (results[name][0] for name in line.operands[:2])
    if line.opcode == 'dot':
        depth = math.prod(left.shape[axis] for axis in _numbers(line, 'lhs_contracting_dims'))
        return 2 * depth * math.prod(line.results[0].shape)
    # TPUs compute every product as a convolution.
    inputs, kernel, output = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', line.attributes).groups()
    groups = [int(line.attribute(f'{name}_group_count') or 1) for name in ('feature', 'batch')]
    features = left.shape[inputs.index('f')] // groups[0]
    pairs = 1
    for axis in (label for label in kernel if label.isdigit()):
        sizes = (array.shape[labels.index(axis)] for array, labels in
                 ((left, inputs), (right, kernel), (line.results[0], output)))  # fmt: skip
        pairs *= _valid_pairs(*sizes, **_window(line, int(axis)))
    rows = left.shape[inputs.index('b')] // groups[1]
    return 2 * features * right.shape[kernel.index('o')] * rows * pairs


def _window(line: Instruction, axis: int) -> dict[str, int]:
    window = re.search(r'window=\{([^}]*)\}', line.attributes)
    fields = dict(re.findall(r'(\w+)=(\S+)', window[1])) if window else {}

    def at(name, default):
        return fields[name].split('x')[axis] if name in fields else default

    return dict(
        stride=int(at('stride', 1)),
        low=int(at('pad', '0_0').split('_')[0]),
        spread=int(at('lhs_dilate', 1)),
        dilation=int(at('rhs_dilate', 1)),
    )


def _valid_pairs(size: int, kernel: int, output: int, *, stride: int, low: int, spread: int, dilation: int) -> int:
    """Returns how many (output, kernel) positions of one axis meet an input rather than padding or a hole."""
    at = np.arange(output)[:, None] * stride + np.arange(kernel)[None, :] * dilation - low
    return int(((at >= 0) & (at < (size - 1) * spread + 1) & (at % spread == 0)).sum())


def _collective(kind, line, runs, inside, results, devices) -> Collective:
    # What TPUs fuse under this name is one operation: an all-reduce of which each device keeps its part.
    if kind == 'all-reduce' and inside.startswith('all-reduce-scatter'):
        kind = 'reduce-scatter'
    group = _group_size(line, devices)
    operand = sum(array.bytes for name in line.operands for array in results[name])
    if kind == 'collective-permute':
        operand = results[line.operands[0]][0].bytes
    source = re.search(r'op_name="([^"]*)"', line.attributes)
    return Collective(kind, group, runs, runs * operand * _RING[kind](group), source[1] if source else line.name)


def _group_size(line: Instruction, devices: int) -> int:
    text = line.attributes
    if (match := re.search(r'replica_groups=\{\{([\d,]*)\}', text)) is not None:
        return len(match[1].split(','))
    if (match := re.search(r'replica_groups=\[\d+,(\d+)\]<=', text)) is not None:
        return int(match[1])
    if (match := re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', text)) is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    return devices
