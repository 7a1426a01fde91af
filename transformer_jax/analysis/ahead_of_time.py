"""A run's programs compiled for chips which are not there: what they hold, compute and communicate."""

from __future__ import annotations

import dataclasses
import itertools
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.analysis import hlo, required
from transformer_jax.analysis.chips import Topology, topology_devices
from transformer_jax.analysis.report import Report
from transformer_jax.analysis.required import Lengths
from transformer_jax.data import planner, ragged
from transformer_jax.data.objectives import Examples, make_objective
from transformer_jax.decoding import init_cache, prefill
from transformer_jax.errors import UserError, choose
from transformer_jax.models import abstract_params, build
from transformer_jax.sharding import (
    MeshConfig,
    batch_sharding,
    batch_shardings,
    bytes_per_device,
    check_batch,
    make_mesh,
    resolve,
    row_devices,
    tracing_on,
)
from transformer_jax.training.compiled import compiler_options
from transformer_jax.training.config import Experiment
from transformer_jax.training.flops import TRAINING_FACTOR, matrix_product_flops
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.state import abstract_state, state_shardings, with_shardings
from transformer_jax.training.step import make_train_step

PROGRAMS = ('train', 'prefill', 'decode')
_SHOWN_COLLECTIVES = 12

# Products of one attention layer in each kernel. The backward kernels make the scores anew, and the gradient of the
# weights twice: seven products for the four of a backward pass.
_KERNEL_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}


@dataclasses.dataclass(frozen=True)
class Work:
    """A program to be compiled, and what it has to do: FLOPs over all chips, outside attention and in it."""

    name: str
    lower: Callable[[], Any]
    rows: int
    lengths: tuple[int, ...]
    model_flops: float
    attention_flops: float
    forward_attention_flops: float


class Plan:
    """An experiment laid out over the chips of a topology, from which its programs are compiled.

    Args:
      devices: of the topology (None: libtpu's descriptions of them).
      options: of XLA, by name, beyond those of a run.

    Raises:
      UserError: for a mesh, a batch or parameters which do not divide, or missing libtpu.
    """

    def __init__(
        self,
        experiment: Experiment,
        topology: Topology,
        devices: Sequence[jax.Device] | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
    ):
        self._experiment, self._topology, self._config = experiment, topology, experiment.model
        self._options = dict(options)
        self._mesh = make_mesh(experiment.mesh, topology_devices(topology) if devices is None else devices)
        self._rules = experiment.mesh.logical_rules
        self._model = build(experiment.model)
        self._params, self._axes = abstract_params(self._model)
        self._shardings = resolve(self._params, self._axes, self._mesh, self._rules)
        # Counted by tracing: dense attention without recomputation, so that its part is known by formula.
        self._plain = build(self._config.replace(attention_backend='reference', remat='none'))

    def report(self, program: str) -> Report:
        """Compiles one of `PROGRAMS` and returns what it costs.

        'train' is the step of `experiments.train` on a batch of the config's size. 'prefill' reads one prompt of the
        longest length for each row device, with parameters in the compute dtype, and 'decode' one token after it.

        Raises:
          UserError: for a program which the model does not have, or one which the compiler refuses.
        """
        choose('--programs', program, PROGRAMS)
        if program == 'train':
            return self._training()
        if self._config.kind in ('encoder', 'vision'):
            raise UserError(f"kind '{self._config.kind}' has no '{program}' program; choose --programs=train")
        return self._decoding(program)

    def _training(self) -> Report:
        experiment = self._experiment
        schedule = make_schedule(experiment.optimizer, self._config.d_model, experiment.training.steps)
        optimizer = make_optimizer(experiment.optimizer, schedule, self._axes)
        abstract = abstract_state(self._params, optimizer, experiment.training.ema_decay is not None)
        whole = NamedSharding(self._mesh, PartitionSpec())
        state = with_shardings(abstract, shardings := state_shardings(abstract, self._shardings, whole))
        batch = abstract_batch(experiment)
        rows, widths = batch['labels'].shape[0], experiment.data.widths
        check_batch(rows // experiment.training.accumulate, self._mesh, self._rules)
        words = self._config.vocab_size if self._config.head == 'lm' else None
        step = make_train_step(self._model, optimizer, schedule, experiment.training, shardings, self._rules, words)
        placed = with_shardings(batch, batch_shardings(batch, self._mesh, self._rules))
        both = {'encoder': (widths[0],) * 2, 'decoder': (widths[-1],) * 2, 'cross': (widths[-1], widths[0])}
        kind = self._config.kind
        lengths = Lengths(**both) if kind == 'encoder_decoder' else Lengths(**{kind: both[kind]})

        def forward(params, inputs):
            out = self._plain.apply({'params': params}, **inputs)
            return out.hidden if out.logits is None else out.logits

        work = self._work('train', forward, (self._params, batch['inputs']), rows, widths, lengths, lengths,
                          lambda: step.lower(state, placed), TRAINING_FACTOR)  # fmt: skip
        return self._compile(work, bytes_per_device(state.params), bytes_per_device(state.opt_state), 0)

    def _decoding(self, program: str) -> Report:
        config, mesh = self._config, self._mesh
        rows = row_devices(mesh, self._rules)
        source, alone = self._experiment.data.widths[0], config.kind == 'decoder'
        prompt = self._experiment.data.widths[-1] if alone else 1
        capacity = prompt + self._experiment.decode.max_new_tokens if alone else self._experiment.data.widths[-1]

        def empty():
            return init_cache(self._model, rows, capacity, None if alone else jnp.zeros((rows, source), jnp.int32))

        def read(params, tokens, cache, mesh=mesh):
            with tracing_on(mesh, self._rules):
                return prefill(self._model, params, tokens, cache, last_only=True)

        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.dtype)), self._params)
        tokens, cache = jax.ShapeDtypeStruct((rows, prompt), jnp.int32), jax.eval_shape(empty)
        seen = Lengths(
            encoder=None if alone else (source, source), decoder=(prompt, prompt), cross=None if alone else (1, source)
        )
        if program == 'decode':
            cache = jax.eval_shape(lambda *operands: read(*operands, mesh=None), params, tokens, cache)[1]
            tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
            seen = seen._replace(encoder=None, decoder=(1, prompt + 1))
        computed = seen._replace(decoder=(tokens.shape[1], capacity))

        def plain(params, tokens, cache):
            return prefill(self._plain, params, tokens, cache)[0]

        # The program itself has the logits of the last token only.
        unread = 2 * rows * (tokens.shape[1] - 1) * config.d_model * config.vocab_rows

        placed = with_shardings(params, self._shardings), self._by_rows(tokens), self._by_rows(cache)
        widths = (tokens.shape[1],) if alone else (source, tokens.shape[1])
        jitted = jax.jit(read, donate_argnums=2)
        work = self._work(program, plain, (params, tokens, cache), rows, widths, computed, seen,
                          lambda: jitted.lower(*placed), 1, unread)  # fmt: skip
        return self._compile(work, bytes_per_device(placed[0]), 0, bytes_per_device(placed[2]))

    def _by_rows(self, tree: Any) -> Any:
        rows, whole = batch_sharding(self._mesh, 1, self._rules), NamedSharding(self._mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if x.ndim else whole), tree)

    def _work(self, name, forward, arguments, rows, widths, computed, seen, lower, factor, unread=0) -> Work:
        """`computed` are the pairs of attention in the traced `forward`, `seen` those which its masks show.

        `unread` are FLOPs of `forward` which the program leaves out.
        """
        inside = required.attention_flops(self._config, rows, computed, visible=False)
        attention = required.attention_flops(self._config, rows, seen, visible=True)
        outside = matrix_product_flops(forward, *arguments) - inside - unread
        return Work(name, lower, rows, tuple(widths), factor * outside, factor * attention, attention)

    def _compile(self, work: Work, parameter_bytes: int, optimizer_bytes: int, cache_bytes: int) -> Report:
        chip, chips, start = self._topology.chip, self._mesh.size, time.perf_counter()
        try:
            compiled = work.lower().compile(compiler_options=compiler_options(self._mesh) | self._options)
        except jax.errors.JaxRuntimeError as error:
            reason = ' '.join(str(error).split())[:300]
            raise UserError(f"'{work.name}' does not compile for {self._topology.name}: {reason}") from error
        seconds = time.perf_counter() - start
        costs, memory = hlo.costs(compiled.as_text()), compiled.memory_analysis()
        product = work.forward_attention_flops / required.attention_layers(self._config) / required.FORWARD_PRODUCTS
        kernel_flops = product / chips * sum(_products(name) * runs for name, runs in costs.kernels.items())
        touched = memory.argument_size_in_bytes + memory.output_size_in_bytes
        largest = sorted(costs.collectives, key=lambda collective: -collective.bytes)[:_SHOWN_COLLECTIVES]
        return Report(
            program=work.name,
            topology=self._topology.name,
            chip=chip,
            mesh={axis: size for axis, size in self._mesh.shape.items() if size > 1},
            rows=work.rows,
            lengths=work.lengths,
            compile_seconds=seconds,
            parameter_bytes=parameter_bytes,
            optimizer_bytes=optimizer_bytes,
            cache_bytes=cache_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            peak_bytes=touched
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes,
            model_flops=work.model_flops / chips,
            attention_flops=work.attention_flops / chips,
            compiled_flops=costs.flops,
            kernel_flops=kernel_flops,
            kernel_recomputed_flops=max(kernel_flops - work.attention_flops / chips, 0.0) if costs.kernels else 0.0,
            kernels=costs.kernels,
            sent_bytes=costs.bytes_by_kind(),
            least_bytes=required.least_bytes(
                self._config, self._params, self._shardings, self._mesh, work.rows, work.lengths, work.name == 'train'
            ),
            largest=tuple((each.kind, each.bytes, each.group, each.runs, each.source) for each in largest),
            unbounded_loops=len(costs.unbounded),
            memory_seconds=touched / chip.hbm_rate,
        )


def _products(kernel: str) -> int:
    return next((count for phase, count in _KERNEL_PRODUCTS.items() if f'_{phase}' in kernel), 0)


def abstract_batch(experiment: Experiment) -> dict[str, Any]:
    """Returns the shapes and types of a training batch, without data and without a vocabulary.

    Raises:
      UserError: for an objective which reads no tokens.
    """
    data = experiment.data
    if not data.widths:
        raise UserError(f"data.objective = '{data.objective}' reads no tokens, so its step cannot be compiled here")
    tokenizer = types.SimpleNamespace(
        pad_id=0, bos_id=1, eos_id=2, vocab_size=data.vocab_size, symbol=lambda name: 3, ordinary_ids=np.arange(3, 9)
    )
    objective = make_objective(data, tokenizer, experiment.model)
    # One example of one token in the first row; the other rows are empty.
    streams = tuple(ragged.Ragged.join([[3]]) for _ in data.widths)
    rows = data.batch_tokens // sum(data.widths) // data.row_multiple * data.row_multiple
    plan = planner.Batch(0, data.widths, np.zeros(1, np.int64), np.minimum(np.arange(rows + 1), 1))
    batch = objective.batch(Examples(streams, np.zeros(1), 1), plan, data.batching == 'pack', 0)
    names = ('inputs', 'labels', 'weights')
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), {name: batch[name] for name in names})


def mesh_shapes(chips: int) -> Iterator[MeshConfig]:
    """Yields the meshes worth comparing: all of data x fsdp x tensor, tensor up to 16, whose product is `chips`."""
    divisors = [size for size in range(1, chips + 1) if chips % size == 0]
    for data, tensor in itertools.product(divisors, [size for size in divisors if size <= 16]):
        if chips % (data * tensor) == 0:
            yield MeshConfig(data=data, fsdp=chips // data // tensor, tensor=tensor)


def sweep(
    experiment: Experiment,
    topology: Topology,
    meshes: Sequence[MeshConfig],
    options: Mapping[str, str],
    progress: Callable[[str], None],
) -> list[Report]:
    """Returns a report of the train step for each mesh, the best first: those which fit, by estimated step time.

    A mesh which does not divide the model, or which the compiler refuses, is left out; `progress` is told why.
    """
    devices, reports = topology_devices(topology), []
    for mesh in meshes:
        name = ' x '.join(f'{axis} {size}' for axis, size in dataclasses.asdict(mesh).items() if size > 1)
        try:
            plan = Plan(dataclasses.replace(experiment, mesh=mesh), topology, devices, options)
            reports.append(plan.report('train'))
            progress(f'{name}: {reports[-1].step_seconds:.4g} s')
        except UserError as error:
            progress(f'{name}: left out: {error}')
    return sorted(reports, key=lambda report: (not report.fits, report.step_seconds))
