"""Classification of texts (Devlin et al. 2019, section 4.1), and what it shares with that of images."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from transformer_jax import errors
from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import planner, ragged, sources, tokenizers
from transformer_jax.data.objectives import base


@dataclasses.dataclass(frozen=True)
class LabelledExamples(base.Examples):
    """Examples and the class of each, (n,) int32."""

    labels: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))


class Classes(base.Objective):
    """A class for each example: logits, labels (B,) and weights (B,) belong to rows, which hold one example each.

    Evaluation reports loss (nats an example), accuracy and examples.

    Raises:
      UserError: for a label which is no class of the model.
    """

    head = 'classes'

    def __init__(
        self, tokenizer: tokenizers.Tokenizer | None, config: data_config.DataConfig, model: ModelConfig | None = None
    ):
        super().__init__(tokenizer, config, model)
        self._classes = None if model is None else model.num_classes

    def check(self, label: int, name: str, number: int) -> int:
        """Returns the label of example `number` of the source `name`, once it is known to be a class of the model."""
        if self._classes is not None and not 0 <= label < self._classes:
            raise errors.UserError(
                f"'{name}' gives example {number + 1} the label {label}; "
                f'model.num_classes = {self._classes} allows 0 to {self._classes - 1}'
            )
        return label

    @staticmethod
    def placed(inputs: dict[str, Any], examples: LabelledExamples, plan: planner.Batch) -> dict[str, Any]:
        """Returns the batch of a plan's rows: these inputs, and label and weight of each row."""
        filled = np.diff(plan.offsets) > 0
        labels = np.zeros(len(filled), np.int32)
        labels[filled] = examples.labels[plan.examples]
        return {'inputs': inputs, 'labels': labels, 'weights': filled.astype(np.float32)}

    def metrics(self, totals: base.Totals, examples: base.Examples) -> dict[str, float]:
        (loss, weight), (right, _) = totals['loss'], totals['accuracy']
        return {'loss': loss / weight, 'accuracy': right / weight, 'examples': len(examples.ids)}


class Classification(Classes):
    """A class for each text: the model reads start, x_1 ... x_n, end and gives logits over classes.

    A text longer than `source_length`, marks included, is cut or, in training, left out as `too_long` says. Batches
    hold tokens and mask (BS int32).

    Raises:
      UserError: as `Classes`, and for a vocabulary without start id.
    """

    name, kind = 'classification', 'encoder'

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: data_config.DataConfig, model: ModelConfig | None = None
    ):
        super().__init__(tokenizer, config, model)
        self._frame = base.frame_ids(tokenizer)

    def encode(self, source: sources.Source, training: bool) -> LabelledExamples:
        start_id, end_id = self._frame
        room = self.widths[0] - 2
        sequences, ids, labels, truncated, too_long = [], [], [], 0, 0
        for start, examples in base.chunks(source, ('label', 'text')):
            texts = self._tokenizer.encode_all([example['text'] for example in examples])
            for number, (tokens, example) in enumerate(zip(texts, examples, strict=True), start):
                if len(tokens) > room and training and self._config.too_long == 'skip':
                    too_long += 1
                    continue
                truncated += len(tokens) > room
                sequences.append([start_id, *tokens[:room], end_id])
                ids.append(number)
                labels.append(self.check(example['label'], source.name, number))
        return LabelledExamples(
            (ragged.Ragged.join(sequences),), np.array(ids), len(source), truncated, too_long,
            labels=np.array(labels, np.int32),
        )  # fmt: skip

    def batch(self, examples: LabelledExamples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        del seed  # Nothing is drawn at random.
        rows = ragged.fill_rows(
            examples.streams[0], plan.examples, plan.offsets, plan.widths[0], self._tokenizer.pad_id
        )
        return self.placed(base.place(rows, rows.tokens, packed), examples, plan)
