"""A trained run, read back for evaluation, translation and notebooks."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from transformer_jax.checkpoints.restore import list_arrays, read_metadata, restore_params
from transformer_jax.data.config import FORMS
from transformer_jax.data.objectives import make_objective
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.models import abstract_params, build, resize_vocabulary
from transformer_jax.sharding import MeshConfig, bytes_per_device, make_mesh, resolve
from transformer_jax.training.config import Experiment
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.run_directory import RunDirectory
from transformer_jax.training.setup import complete
from transformer_jax.training.state import with_shardings

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RestoredRun:
    """Parameters of a run on the devices at hand, and what belongs to them; `origin` says which parameters."""

    experiment: Experiment
    model: nn.Module
    params: Any
    tokenizer: Tokenizer | None
    decode: DecodeConfig
    origin: str
    mesh: Mesh

    def evaluator(self, decode: DecodeConfig) -> Evaluator:
        """Returns what judges the parameters, searching by `decode`."""
        data = self.experiment.data
        objective = make_objective(data, self.tokenizer, self.model.config)
        rules = self.experiment.mesh.logical_rules
        return Evaluator(self.model, self.tokenizer, objective, data, decode, self.mesh, rules)


def load_run(workdir: str | os.PathLike, step: int | None = None) -> RestoredRun:
    """Restores a run from its directory, on any number of devices: where the run's own mesh does not fit, on 'auto'.

    Args:
      workdir: a run directory.
      step: a checkpoint; its moving average is taken where it has one. None takes what the run itself was judged by:
        the mean of its last checkpoints if it made one at its end, else the newest checkpoint.

    Raises:
      UserError: if the directory holds no run, or no such checkpoint.
    """
    directory = RunDirectory(workdir)
    experiment, tokenizer = directory.experiment(), directory.tokenizer()
    if tokenizer is None and FORMS[experiment.data.objective].words:
        raise UserError(f"'{directory.path}' has no vocabulary; the run in it has not begun")
    model_config, decode = complete(experiment, tokenizer)
    model = build(model_config)
    abstract, axes = abstract_params(model)
    rules = experiment.mesh.logical_rules
    mesh = make_mesh(
        _mesh_here(experiment.mesh),
        need=lambda mesh: bytes_per_device(with_shardings(abstract, resolve(abstract, axes, mesh, rules))),
    )
    parts = math.prod(mesh.shape[axis] for axis in rules['vocab'])
    if model_config.vocab_rows % parts == 0:
        params, origin = _restore(directory, model, step, resolve(abstract, axes, mesh, rules))
        return RestoredRun(experiment, model, params, tokenizer, decode, origin, mesh)
    params, origin = _restore(directory, model, step, None)
    model = build(model_config.replace(vocab_multiple=parts))
    params = resize_vocabulary(params, axes, model.config.vocab_rows)
    params = jax.device_put(params, resolve(*abstract_params(model), mesh, rules))
    return RestoredRun(experiment, model, params, tokenizer, decode, origin, mesh)


def _mesh_here(trained: MeshConfig) -> MeshConfig:
    try:
        trained.shape(jax.device_count())
    except UserError as error:
        _logger.warning('%s; taking mesh.layout = auto instead', error)
        return MeshConfig(layout='auto', rules=trained.rules)
    return trained


def _restore(directory: RunDirectory, model: nn.Module, step: int | None, shardings: Any) -> tuple[Any, str]:
    """Returns parameters, and in words which they are."""
    folder, origin = directory.checkpoints, 'step'
    newest = read_metadata(folder, step)['step']
    if step is None and directory.averaged.is_dir() and read_metadata(directory.averaged)['step'] == newest:
        folder, origin = directory.averaged, 'mean of the last checkpoints up to step'
    ema = any(name.startswith('ema/') for name in list_arrays(folder, step))
    params = restore_params(folder, step, shardings, abstract=abstract_params(model)[0], ema=ema)
    return params, f'{"moving average of step" if ema else origin} {newest}'


def restore(run_directory: str | os.PathLike, step: int | None = None, shardings: Any = None) -> tuple[nn.Module, Any]:
    """Returns the model of a run and its parameters, numpy arrays on the host unless shardings are given.

    Rows past the vocabulary (`ModelConfig.vocab_multiple`) are left out.

    Args:
      run_directory, step: as in `load_run`, and the same parameters are taken.
      shardings: one sharding for all parameters, or a tree of them.

    Raises:
      UserError: as `load_run`.
    """
    directory = RunDirectory(run_directory)
    model = build(directory.model_config())
    if model.config.vocab_rows == model.config.vocab_size:
        return model, _restore(directory, model, step, shardings)[0]
    trimmed = build(model.config.replace(vocab_multiple=1))
    params = _restore(directory, model, step, None)[0]
    params = resize_vocabulary(params, abstract_params(model)[1], trimmed.config.vocab_size)
    return trimmed, params if shardings is None else jax.device_put(params, shardings)
