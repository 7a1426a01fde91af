"""What the runs of a sweep cost, counted before they start, and whether its arms can be compared fairly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformer_jax.data.objectives import make_objective
from transformer_jax.data.pipeline import TrainPipeline
from transformer_jax.data.sources import open_split
from transformer_jax.data.tokenizers import open_tokenizer
from transformer_jax.models import abstract_params, build, count_params
from transformer_jax.training.config import Experiment
from transformer_jax.training.flops import training_flops
from transformer_jax.training.setup import complete

TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Cost:
    """What training one arm takes.

    Attributes:
      parameters: of the model.
      slots: token slots of the run's batches, source and target, padding included; where there are no tokens, labels.
      tokens: target tokens which the run learns from, expected from the share of padding.
      flops: of all matrix products of the run's training steps, 2 for each multiply-add.
    """

    parameters: int
    slots: int
    tokens: int
    flops: int

    @property
    def flops_per_slot(self) -> float:
        """FLOPs of training for each token slot."""
        return self.flops / self.slots


def costs(experiments: Mapping[str, Experiment]) -> dict[str, Cost]:
    """Returns the cost of each experiment, from the shapes of its real batches; nothing is trained.

    Of a run with several shapes of batches each counts as often as an epoch has it.
    """
    pipelines: dict[str, TrainPipeline] = {}
    found = {}
    for name, experiment in experiments.items():
        key = json.dumps(experiment.data.to_dict(), sort_keys=True)
        source = open_split(experiment.data, 'train')
        tokenizer = open_tokenizer(experiment.data, source)
        config, _ = complete(experiment, tokenizer)
        objective = make_objective(experiment.data, tokenizer, config)
        if key not in pipelines:
            pipelines[key] = TrainPipeline(source, tokenizer, objective, experiment.data, experiment.training.seed)
        found[name] = _cost(experiment, build(config), pipelines[key])
    return found


def _cost(experiment: Experiment, model: Any, pipeline: TrainPipeline) -> Cost:
    params = abstract_params(model)[0]
    flops = slots = 0
    for shapes, steps in pipeline.steps_by_shape():
        flops += steps * training_flops(model, params, shapes['inputs'])
        tokens = [leaf.size for name, leaf in shapes['inputs'].items() if name.endswith('tokens')]
        slots += steps * (sum(tokens) or shapes['labels'].size)
    epochs = experiment.training.steps / pipeline.steps_per_epoch
    return Cost(
        count_params(params), round(slots * epochs), round(pipeline.tokens_per_epoch * epochs), round(flops * epochs)
    )


def fairness(costs: Mapping[str, Cost], experiments: Mapping[str, Experiment], baseline: str) -> list[str]:
    """Returns in sentences what is equal between the arms and what is not.

    Batches are a function of the data's config, the seed and the step, so arms whose configs of data agree see the same
    sentences in the same order, seed by seed. Parameters and FLOPs are named where they are off by more than 1 %.
    """
    own, lines = costs[baseline], []
    orders = [name for name in experiments if _order(experiments[name]) != _order(experiments[baseline])]
    budgets = [name for name in costs if costs[name].slots != own.slots]
    lines.append(
        f'Data order: not that of the baseline in {_list(orders)}.' if orders
        else 'Data order: the same in all arms, seed by seed.'
    )  # fmt: skip
    budget = f'{own.slots:,} token slots a run, of which about {own.tokens:,} are target tokens'
    lines.append(
        f'Token budget: {budget} in the baseline; it differs in {_list(budgets)}.' if budgets
        else f'Token budget: the same in all arms, {budget}.'
    )  # fmt: skip
    for what, of in (('Parameters', lambda cost: cost.parameters), ('FLOPs', lambda cost: cost.flops_per_slot)):
        off = {name: of(cost) / of(own) - 1 for name, cost in costs.items()}
        shown = [f'{name} ({share:+.1%})' for name, share in off.items() if abs(share) > TOLERANCE]
        lines.append(
            f'{what}: more than 1 % off the baseline: {", ".join(shown)}.' if shown
            else f'{what}: within 1 % of the baseline in all arms.'
        )  # fmt: skip
    return lines


def _order(experiment: Experiment) -> Any:
    return experiment.data, experiment.training.steps


def _list(names: Sequence[str]) -> str:
    return ', '.join(names)
