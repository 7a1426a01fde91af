"""Everything a run needs before its first step: data, vocabulary, model, mesh, shardings, optimizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import ModelConfig
from transformer_jax.data.objectives import Objective, decoder_start_id, make_objective
from transformer_jax.data.pipeline import TrainPipeline
from transformer_jax.data.sources import Source, open_split
from transformer_jax.data.tokenizers import Tokenizer, open_tokenizer
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.models import abstract_params, build, init_params
from transformer_jax.sharding import check_batch, make_mesh, resolve, startup_table
from transformer_jax.training.config import Experiment
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.optimizer import Schedule, make_optimizer, make_schedule
from transformer_jax.training.run_directory import RunDirectory
from transformer_jax.training.state import TrainState, abstract_state, init_state, state_shardings, with_shardings

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, all made from its experiment."""

    experiment: Experiment
    directory: RunDirectory
    tokenizer: Tokenizer
    objective: Objective
    train_source: Source
    valid_source: Source | None
    test_source: Source | None
    model: nn.Module
    decode: DecodeConfig
    mesh: Mesh
    optimizer: optax.GradientTransformation
    schedule: Schedule
    shardings: TrainState

    @property
    def is_first(self) -> bool:
        """Whether this process is the one which writes files of the run directory."""
        return jax.process_index() == 0

    @property
    def abstract(self) -> TrainState:
        """The state as shapes with shardings: what is compiled for, made, or restored into."""
        abstract = abstract_state(
            abstract_params(self.model)[0], self.optimizer, self.experiment.training.ema_decay is not None
        )
        return with_shardings(abstract, self.shardings)

    def init(self) -> TrainState:
        """Returns the state before step 1."""
        training = self.experiment.training
        return init_state(
            functools.partial(init_params, self.model),
            self.optimizer,
            jax.random.key(training.seed),
            training.ema_decay is not None,
            self.shardings,
        )

    def train_pipeline(self) -> TrainPipeline:
        """Returns the training batches of this process."""
        return TrainPipeline(
            self.train_source, self.tokenizer, self.objective, self.experiment.data, self.experiment.training.seed,
            jax.process_index(), jax.process_count(),
        )  # fmt: skip

    def evaluator(self) -> Evaluator:
        """Returns what judges parameters of this run."""
        return Evaluator(self.model, self.tokenizer, self.objective, self.experiment.data, self.decode, self.mesh)


def prepare(experiment: Experiment, workdir: str) -> Run:
    """Builds a run in a new directory, or in one which already belongs to this experiment.

    Everything a user can get wrong is checked before anything is written.

    Raises:
      UserError: for bad data, a vocabulary or batch which does not fit, or a directory of another experiment.
    """
    directory = RunDirectory(workdir)
    directory.check(experiment)
    data = experiment.data
    sources = {split: open_split(data, split) for split in ('train', 'valid', 'test')}
    tokenizer = _tokenizer(experiment, directory, sources['train'])
    model_config, decode = complete(experiment, tokenizer)
    objective = make_objective(data, tokenizer, model_config)
    if experiment.training.bleu_every is not None and not objective.references:
        raise UserError(f"training.bleu_every needs translations, which data.objective = '{data.objective}' has not")
    model = build(model_config)
    mesh = make_mesh(experiment.mesh)
    check_batch(data.row_multiple // experiment.training.accumulate or 1, mesh)
    check_batch(data.evaluation_rows, mesh)
    schedule = make_schedule(experiment.optimizer, model_config.d_model, experiment.training.steps)
    params, axes = abstract_params(model)
    optimizer = make_optimizer(experiment.optimizer, schedule, axes)
    abstract = abstract_state(params, optimizer, experiment.training.ema_decay is not None)
    shardings = state_shardings(abstract, resolve(params, axes, mesh), NamedSharding(mesh, PartitionSpec()))
    _logger.info('parameters:\n%s', startup_table(params, axes, mesh))
    if jax.process_index() == 0:
        directory.write(experiment, model_config, tokenizer)
    return Run(
        experiment, directory, tokenizer, objective, sources['train'], sources['valid'], sources['test'],
        model, decode, mesh, optimizer, schedule, shardings,
    )  # fmt: skip


def _tokenizer(experiment: Experiment, directory: RunDirectory, source: Source) -> Tokenizer:
    if experiment.training.accumulate > 1 and experiment.data.row_multiple % experiment.training.accumulate:
        raise UserError(
            f'data.row_multiple = {experiment.data.row_multiple} does not divide into training.accumulate = '
            f'{experiment.training.accumulate} micro-batches; make it a multiple'
        )
    own = directory.tokenizer()
    return open_tokenizer(experiment.data, source) if own is None else own


def complete(experiment: Experiment, tokenizer: Tokenizer) -> tuple[ModelConfig, DecodeConfig]:
    """Returns the model and the search with the vocabulary's ids filled in.

    Raises:
      UserError: if the model's vocabulary is not the tokenizer's.
    """
    if experiment.model.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f'model.vocab_size = {experiment.model.vocab_size}, but the vocabulary has {tokenizer.vocab_size} ids; '
            f'set data.vocab_size = {tokenizer.vocab_size}, which the configs hand on to the model'
        )
    decode = experiment.decode.replace(
        eos_ids=(tokenizer.eos_id,),
        pad_id=tokenizer.pad_id,
        decoder_start_id=decoder_start_id(tokenizer, experiment.data),
    )
    return experiment.model.replace(decode=decode), decode


def evaluation_params(state: TrainState) -> Any:
    """Returns the parameters by which a run is judged: the moving average where there is one."""
    return state.params if state.ema is None else state.ema
