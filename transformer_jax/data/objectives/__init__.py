"""What a model has to do with an example: how it becomes token sequences, and how rows of them become a batch.

Planner and pipeline know an objective only by the lengths of its token streams.
"""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import tokenizers
from transformer_jax.data.objectives.base import Examples, Objective, decoder_start_id
from transformer_jax.data.objectives.classification import Classification
from transformer_jax.data.objectives.images import ImageClassification
from transformer_jax.data.objectives.language import CausalLM, PrefixLM
from transformer_jax.data.objectives.masked import MaskedLM
from transformer_jax.data.objectives.spans import SpanCorruption
from transformer_jax.data.objectives.translation import Translation

__all__ = ['OBJECTIVES', 'Examples', 'Objective', 'decoder_start_id', 'make_objective']

OBJECTIVES = {
    objective.name: objective
    for objective in (Translation, CausalLM, PrefixLM, MaskedLM, SpanCorruption, Classification, ImageClassification)
}


def make_objective(
    config: data_config.DataConfig, tokenizer: tokenizers.Tokenizer | None, model: ModelConfig | None = None
) -> Objective:
    """Builds the objective which `config` names, and checks that it can train `model` where one is given.

    Raises:
      UserError: for a model of another kind or head, or a vocabulary which lacks a special id.
    """
    return OBJECTIVES[config.objective](tokenizer, config, model)
