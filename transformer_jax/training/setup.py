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

from transformer_jax.checkpoints import CheckpointManager, Restored
from transformer_jax.checkpoints.processes import all_true, barrier
from transformer_jax.config import ModelConfig
from transformer_jax.data.objectives import Objective, decoder_start_id, make_objective
from transformer_jax.data.pipeline import TrainPipeline
from transformer_jax.data.sources import Source, open_split
from transformer_jax.data.tokenizers import Tokenizer, open_tokenizer
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.models import abstract_params, build, init_params
from transformer_jax.models.parameters import fit_shape
from transformer_jax.sharding import (
    bytes_per_device,
    check_batch,
    check_memory,
    check_replicated,
    make_mesh,
    resolve,
    row_share,
    startup_table,
)
from transformer_jax.training.config import Experiment, TrainingConfig
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.optimizer import Schedule, make_optimizer, make_schedule
from transformer_jax.training.run_directory import CONFIG_FILE, RunDirectory
from transformer_jax.training.state import TrainState, abstract_state, init_state, state_shardings, with_shardings

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, all made from its experiment."""

    experiment: Experiment
    directory: RunDirectory
    tokenizer: Tokenizer | None
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
    def vocabulary(self) -> str | None:
        """What tells vocabularies apart; None where examples have no words."""
        return None if self.tokenizer is None else self.tokenizer.fingerprint

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

    def restore(self, manager: CheckpointManager) -> Restored:
        """Restores the newest intact checkpoint; a vocabulary filled up for another mesh is cut and filled up anew."""
        own = self.model.config
        try:
            multiple = manager.metadata()['experiment']['model'].get('vocab_multiple', 1)
        except UserError:  # The newest one is damaged; which of the others is not, the manager finds out.
            multiple = own.vocab_multiple
        saved = own.replace(vocab_multiple=multiple)
        if saved.vocab_rows == own.vocab_rows:
            return manager.restore(self.abstract)
        ema = self.experiment.training.ema_decay is not None
        restored = manager.restore(abstract_state(abstract_params(build(saved))[0], self.optimizer, ema))
        fitted = jax.tree.map(
            lambda held, wanted: jax.device_put(fit_shape(held, wanted.shape), wanted.sharding),
            restored.state,
            self.abstract,
        )
        return restored._replace(state=fitted)

    def train_pipeline(self) -> TrainPipeline:
        """Returns the training batches of this process."""
        return TrainPipeline(
            self.train_source, self.tokenizer, self.objective, self.experiment.data, self.experiment.training.seed,
            *row_share(self.mesh, self.experiment.mesh.logical_rules),
        )  # fmt: skip

    def evaluator(self) -> Evaluator:
        """Returns what judges parameters of this run."""
        return Evaluator(
            self.model, self.tokenizer, self.objective, self.experiment.data, self.decode, self.mesh,
            self.experiment.mesh.logical_rules,
        )  # fmt: skip


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
    _check_expert_bias(experiment.training, model_config)
    model = build(model_config)
    schedule = make_schedule(experiment.optimizer, model_config.d_model, experiment.training.steps)
    params, axes = abstract_params(model)
    optimizer = make_optimizer(experiment.optimizer, schedule, axes)
    abstract = abstract_state(params, optimizer, experiment.training.ema_decay is not None)
    rules = experiment.mesh.logical_rules

    def place(mesh):
        return state_shardings(abstract, resolve(params, axes, mesh, rules), NamedSharding(mesh, PartitionSpec()))

    mesh = make_mesh(experiment.mesh, need=lambda mesh: bytes_per_device(with_shardings(abstract, place(mesh))))
    check_batch(data.row_multiple // experiment.training.accumulate or 1, mesh, rules)
    check_batch(data.evaluation_rows, mesh, rules)
    shardings = place(mesh)
    _logger.info('parameters:\n%s', startup_table(params, axes, mesh, rules))
    _logger.info('%s', check_memory(with_shardings(abstract, shardings), mesh))
    check_replicated(params, axes, mesh, rules, limit_bytes=experiment.mesh.replicated_limit_bytes)
    barrier('run_directory_read')
    if jax.process_index() == 0:
        directory.write(experiment, model_config, tokenizer)
    barrier('run_directory_written')
    if not all_true((directory.path / CONFIG_FILE).exists()):
        raise UserError(
            f"workdir '{directory.path}' is not the same folder on every host; give one on a file system which all "
            'hosts share (NFS, or a bucket mounted by gcsfuse)'
        )
    return Run(
        experiment, directory, tokenizer, objective, sources['train'], sources['valid'], sources['test'],
        model, decode, mesh, optimizer, schedule, shardings,
    )  # fmt: skip


def _tokenizer(experiment: Experiment, directory: RunDirectory, source: Source) -> Tokenizer | None:
    if experiment.training.accumulate > 1 and experiment.data.row_multiple % experiment.training.accumulate:
        raise UserError(
            f'data.row_multiple = {experiment.data.row_multiple} does not divide into training.accumulate = '
            f'{experiment.training.accumulate} micro-batches; make it a multiple'
        )
    own = directory.tokenizer()
    return open_tokenizer(experiment.data, source) if own is None else own


def _check_expert_bias(training: TrainingConfig, model: ModelConfig) -> None:
    if training.expert_bias == 'fixed':
        return
    if model.mixture is None or not model.mixture.correction_bias:
        raise UserError("training.expert_bias = 'balance' needs model.mixture.correction_bias, which it moves")
    if model.param_dtype != 'float32':
        raise UserError(
            f"training.expert_bias = 'balance' takes steps too small for model.param_dtype = '{model.param_dtype}'; "
            "choose 'float32'"
        )


def complete(experiment: Experiment, tokenizer: Tokenizer | None) -> tuple[ModelConfig, DecodeConfig]:
    """Returns the model and the search with the vocabulary's ids filled in, as they are where there are no words.

    Raises:
      UserError: if the model's vocabulary is not the tokenizer's.
    """
    if tokenizer is None:
        return experiment.model, experiment.decode
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
