"""What a run is: one experiment made of a model, data, an optimizer, a training plan, decoding and a mesh."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError, choose, suggest
from transformer_jax.sharding import MeshConfig

OPTIMIZERS = ('adam', 'adamw', 'adafactor')
MOMENTS = ('float32', 'int8')
MASTERS = ('none', 'float32')
SCHEDULES = ('noam', 'cosine', 'linear', 'constant')
EXPERT_BIASES = ('fixed', 'balance')
RANDOM_BITS = ('threefry2x32', 'rbg', 'unsafe_rbg')


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How parameters move ("Attention Is All You Need", section 5.3).

    `learning_rate` is the peak rate of cosine, linear and constant schedules, and the factor before
    D^-0.5 min(n^-0.5, n W^-1.5) of `noam`. `weight_decay` is decoupled and touches matrices only.
    `final_fraction` is the last rate of cosine and linear over the peak. `clip_norm` bounds the global norm.

    `name`: 'adam', 'adamw' or 'adafactor', which keeps a row and a column in place of a second moment and no first one
    (Shazeer and Stern 2018), and moves each matrix by a share of its own size. `moments` of Adam: 'float32', or 'int8'
    in blocks (Dettmers et al. 2021). `master`: 'float32' keeps copies of the parameters in fp32, of which parameters in
    bfloat16 (model.param_dtype) are the rounding; else updates below half a unit of the last place would be lost.
    """

    name: str = 'adam'
    learning_rate: float = 1.0
    schedule: str = 'noam'
    warmup_steps: int = 4000
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip_norm: float | None = None
    moments: str = 'float32'
    master: str = 'none'

    def __post_init__(self):
        choose('optimizer.name', self.name, OPTIMIZERS)
        choose('optimizer.moments', self.moments, MOMENTS)
        choose('optimizer.master', self.master, MASTERS)
        choose('optimizer.schedule', self.schedule, SCHEDULES)
        _require(self.learning_rate > 0, f'optimizer.learning_rate = {self.learning_rate} must be above 0')
        _require(self.warmup_steps >= 0, f'optimizer.warmup_steps = {self.warmup_steps} must be 0 or more')
        _require(
            self.schedule != 'noam' or self.warmup_steps > 0,
            "optimizer.warmup_steps = 0 has no meaning for schedule 'noam'; use 1 or more, or schedule 'constant'",
        )
        _require(0 <= self.final_fraction <= 1, f'optimizer.final_fraction = {self.final_fraction} must lie in [0, 1]')
        _require(0 <= self.b1 < 1 and 0 <= self.b2 < 1, f'optimizer.b1, b2 = {self.b1}, {self.b2} must lie in [0, 1)')
        _require(self.eps > 0, f'optimizer.eps = {self.eps} must be above 0')
        _require(self.weight_decay >= 0, f'optimizer.weight_decay = {self.weight_decay} must be 0 or more')
        _require(
            self.weight_decay == 0 or self.name == 'adamw',
            f"optimizer.weight_decay = {self.weight_decay} needs optimizer.name 'adamw', not '{self.name}'",
        )
        if self.name == 'adafactor':
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for field in ('b1', 'b2', 'eps', 'moments'):
                _require(
                    getattr(self, field) == defaults[field],
                    f"optimizer.{field} = {getattr(self, field)!r} means nothing to 'adafactor', which has no such "
                    f'choice; leave it at {defaults[field]!r}',
                )
        _require(
            self.clip_norm is None or self.clip_norm > 0,
            f'optimizer.clip_norm = {self.clip_norm} must be above 0 or None',
        )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long and how carefully a run trains; all durations count optimizer steps unless they say seconds.

    `accumulate` splits the rows of each batch into that many micro-batches. `random_bits` names the generator of
    dropout masks. `best_metric`, of the validation split, names the checkpoint which is kept beside the last `keep`.
    `average_last` checkpoints, spaced by `checkpoint_every`, are averaged at the end (section 6.1).
    `expert_bias`: the correction biases of a mixture of experts are 'fixed', or 'balance': each moves by
    `expert_bias_rate` a step against its expert's load in the batch (DeepSeek-V3, section 2.1.2).
    """

    steps: int = 10_000
    seed: int = 0
    label_smoothing: float = 0.1
    z_loss: float = 0.0
    accumulate: int = 1
    random_bits: str = 'threefry2x32'
    log_every: int = 50
    evaluate_every: int = 500
    bleu_every: int | None = None
    bleu_sentences: int = 200
    checkpoint_every: int = 500
    checkpoint_seconds: float | None = None
    keep: int = 5
    best_metric: str = 'loss'
    ema_decay: float | None = None
    average_last: int = 1
    nonfinite_limit: int = 10
    expert_bias: str = 'fixed'
    expert_bias_rate: float = 1e-3

    def __post_init__(self):
        choose('training.random_bits', self.random_bits, RANDOM_BITS)
        choose('training.expert_bias', self.expert_bias, EXPERT_BIASES)
        _require(self.expert_bias_rate > 0, f'training.expert_bias_rate = {self.expert_bias_rate} must be above 0')
        choose('training.best_metric', self.best_metric, ('loss', 'bleu', 'accuracy'))
        for name in (
            'steps', 'accumulate', 'log_every', 'evaluate_every', 'bleu_sentences', 'checkpoint_every', 'keep',
            'average_last', 'nonfinite_limit',
        ):  # fmt: skip
            _require(getattr(self, name) >= 1, f'training.{name} = {getattr(self, name)} must be 1 or more')
        for name in ('bleu_every', 'checkpoint_seconds'):
            value = getattr(self, name)
            _require(value is None or value > 0, f'training.{name} = {value} must be above 0 or None')
        _require(0 <= self.label_smoothing < 1, f'training.label_smoothing = {self.label_smoothing} must lie in [0, 1)')
        _require(self.z_loss >= 0, f'training.z_loss = {self.z_loss} must be 0 or more')
        _require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f'training.ema_decay = {self.ema_decay} must lie in (0, 1) or be None',
        )
        _require(
            self.average_last <= self.keep,
            f'training.average_last = {self.average_last} needs as many checkpoints; training.keep is {self.keep}',
        )
        _require(
            self.best_metric != 'bleu' or self.bleu_every is not None,
            "training.best_metric = 'bleu' needs training.bleu_every, since BLEU is otherwise only taken at the end",
        )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything which a run depends on; its dictionary is the run directory's config.json."""

    name: str = 'default'
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dictionaries of plain values which JSON can hold."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Experiment:
        """Returns the experiment which `to_dict` described; fields left out keep their defaults.

        Raises:
          UserError: for an unknown name (with the nearest valid one) or a value of the wrong type.
        """
        return from_plain(cls, values, 'config')


def to_plain(value: Any) -> Any:
    """Returns dataclasses as dictionaries and tuples as lists, recursively."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(cls: type, values: dict[str, Any], path: str) -> Any:
    """Returns the dataclass `cls` made of nested dictionaries, checking each name and type.

    Raises:
      UserError: naming the field by its dotted path.
    """
    if not isinstance(values, dict):
        raise UserError(f'{path} = {values!r} must be a group of fields')
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            raise UserError(f'{path}.{name} is unknown{suggest(name, names)}')
    return cls(**{name: _typed(hints[name], value, f'{path}.{name}') for name, value in values.items()})


def _typed(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if value is None:
        if type(None) in options:
            return None
        raise UserError(f'{path} = None must be {_name(hint)}')
    for option in options:
        origin = typing.get_origin(option) or option
        if dataclasses.is_dataclass(option):
            return value if isinstance(value, option) else from_plain(option, value, path)
        if origin is tuple and isinstance(value, (list, tuple)):
            return tuple(tuple(item) if isinstance(item, list) else item for item in value)
        if origin is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if origin is typing.Any or (isinstance(value, origin) and (origin is bool or not isinstance(value, bool))):
            return value
    raise UserError(f'{path} = {value!r} must be {_name(hint)}')


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace('typing.', '')


def differences(old: Any, new: Any, path: str = 'config') -> list[str]:
    """Returns one line `path: old -> new` for each leaf in which two nested dictionaries differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new:
                side = 'only in this config' if name in new else 'only in the run directory'
                lines.append(f'{path}.{name}: {side} ({(new if name in new else old)[name]!r})')
            else:
                lines += differences(old[name], new[name], f'{path}.{name}')
        return lines
    return [] if old == new else [f'{path}: {old!r} -> {new!r}']
