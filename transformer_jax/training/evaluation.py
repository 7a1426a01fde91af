"""Loss, accuracy and translations of whole splits, each example counted once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from transformer_jax.data.config import DataConfig
from transformer_jax.data.objectives import Objective
from transformer_jax.data.pipeline import EvaluationPipeline
from transformer_jax.data.sources import Source, iterate
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.sharding import DEFAULT_RULES, Rules, batch_shardings, place_batch, row_share
from transformer_jax.training.compiled import AheadOfTime
from transformer_jax.training.scores import Scores, score
from transformer_jax.training.state import with_shardings
from transformer_jax.training.step import make_eval_step
from transformer_jax.training.translate import Answer, translate


class Evaluator:
    """Judges parameters of one model on any source which fits its objective.

    Attributes:
      references: whether there are targets against which `scores` can hold what the model writes.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None,
        objective: Objective,
        data: DataConfig,
        decode: DecodeConfig,
        mesh: Mesh,
        rules: Rules = DEFAULT_RULES,
    ):
        self._model, self._tokenizer, self._objective = model, tokenizer, objective
        self._mesh, self._rules = mesh, rules
        self._data, self._decode, self.references = data, decode, objective.references
        self._step = AheadOfTime('evaluation step', make_eval_step(model, mesh, rules), keyed_by=1)
        self._pipelines: dict[str, EvaluationPipeline] = {}

    def loss(self, params: Any, source: Source) -> dict[str, float]:
        """Returns what the objective reports of the split; of a translation loss (unsmoothed nats a target token, EOS
        included), perplexity, accuracy, tokens and examples.

        Sums and weights are added up over all batches and divided once, so the result does not depend on their size.
        Padding rows have weight 0 and `example_ids` -1. Of several processes each gets the sum of all.
        """
        pipeline = self._pipeline(source)
        if not self._step.compilations:
            self._compile(params, pipeline)
        sums = [self._step(params, place_batch(_for_model(batch), self._mesh, self._rules)) for batch in pipeline]
        totals = jax.tree.map(lambda *parts: math.fsum(float(part) for part in parts), *jax.device_get(sums))
        return self._objective.metrics(totals, pipeline.examples)

    def translate(
        self, params: Any, source: Source, progress: Callable[[int], None] = lambda done: None
    ) -> list[list[Answer]]:
        """Returns the translations of every example of `source`, in its order."""
        return translate(
            self._model, params, self._tokenizer, [pair['source'] for pair in iterate(source)], self._decode,
            longest=self._data.source_length, rows=self._data.evaluation_rows, progress=progress,
        )  # fmt: skip

    def scores(
        self, params: Any, source: Source, progress: Callable[[int], None] = lambda done: None
    ) -> tuple[Scores, list[str]]:
        """Returns the scores of the best translations against the targets as they stand, and the translations."""
        hypotheses = [answers[0].text for answers in self.translate(params, source, progress)]
        return score(hypotheses, [pair['target'] for pair in iterate(source)]), hypotheses

    def _pipeline(self, source: Source) -> EvaluationPipeline:
        if source.name not in self._pipelines:
            self._pipelines[source.name] = EvaluationPipeline(
                source, self._tokenizer, self._objective, self._data, *row_share(self._mesh, self._rules)
            )
        return self._pipelines[source.name]

    def _compile(self, params: Any, pipeline: EvaluationPipeline) -> None:
        (shapes,) = map(_for_model, pipeline.shapes())
        self._step.compile(params, with_shardings(shapes, batch_shardings(shapes, self._mesh, self._rules)))


def _for_model(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in ('inputs', 'labels', 'weights')}
