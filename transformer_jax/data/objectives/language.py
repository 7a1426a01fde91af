"""Language models which read from left to right: causal, and with a prefix which all tokens see."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import planner, ragged, sources, tokenizers
from transformer_jax.data.objectives import base


@dataclasses.dataclass(frozen=True)
class TextExamples(base.Examples):
    """Pieces of texts, and the UTF-8 bytes of all the texts they come from."""

    text_bytes: int = 0


class CausalLM(base.Objective):
    """Every token from those before it (Radford et al. 2019): from start, x_1 ... x_n-1 the model learns x_1 ... x_n.

    A text and its end mark are cut into pieces of at most `target_length` tokens, each read after the decoder start id;
    nothing is cut off. Batches hold tokens, mask and, when packed, positions and segment_ids (BT int32); labels BT are
    the pieces themselves, `pad_id` at padding; weights BT are 1 at tokens.

    Evaluation reports bits per byte = loss sum / (ln 2 * UTF-8 bytes of the texts), which does not depend on the
    vocabulary: end marks cost bits and are no bytes.

    Raises:
      UserError: for decoder_start 'bos' with a vocabulary which has no start id.
    """

    name, kind = 'causal_lm', 'decoder'

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: data_config.DataConfig, model: ModelConfig | None = None
    ):
        super().__init__(tokenizer, config, model)
        self.decoder_start_id = base.decoder_start_id(tokenizer, config)

    def encode(self, source: sources.Source, training: bool) -> TextExamples:
        del training  # Nothing is left out.
        pieces = base.cut(self._tokenizer, source, self.widths[0], [self._tokenizer.eos_id])
        stream = ragged.Ragged.join(pieces.tokens)
        return TextExamples((stream,), pieces.ids, len(pieces.ids), text_bytes=pieces.text_bytes)

    def batch(self, examples: base.Examples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        del seed  # Nothing is drawn at random.
        pad = self._tokenizer.pad_id
        rows = ragged.fill_rows(examples.streams[0], plan.examples, plan.offsets, plan.widths[0], pad)
        inputs = base.place(rows, rows.shifted(self.decoder_start_id, pad), packed)
        return {'inputs': inputs, 'labels': rows.tokens, 'weights': rows.mask.astype(np.float32)}

    def metrics(self, totals: base.Totals, examples: TextExamples) -> dict[str, float]:
        bits = totals['loss'][0] / math.log(2)
        return {**super().metrics(totals, examples), 'bits_per_byte': bits / examples.text_bytes}


class PrefixLM(CausalLM):
    """The rest of a piece from its beginning, whose tokens all see each other (Raffel et al. 2020, section 3.2.3).

    A piece of n labels gets a prefix of P slots, P uniform in 1 ... n, drawn anew each epoch; P = 1 is the causal
    model. Batches are those of `CausalLM` with `prefix` (B,); label t has weight 1 only if t >= P - 1, counted from 0,
    since the earlier ones stand in the prefix. A prefix belongs to a row, so rows hold one piece each.

    Attributes and errors are those of `CausalLM`.
    """

    name = 'prefix_lm'

    def batch(self, examples: base.Examples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        batch = super().batch(examples, plan, packed, seed)
        lengths = examples.streams[0].lengths
        prefix = np.zeros(len(plan.offsets) - 1, np.int32)
        prefix[np.diff(plan.offsets) > 0] = [
            random.integers(1, lengths[example] + 1) for example, random in base.generators(plan, seed)
        ]
        learned = np.arange(plan.widths[0]) >= prefix[:, None] - 1
        inputs = {**batch['inputs'], 'prefix': prefix}
        return {'inputs': inputs, 'labels': batch['labels'], 'weights': batch['weights'] * learned.astype(np.float32)}

    def metrics(self, totals: base.Totals, examples: TextExamples) -> dict[str, float]:
        # Not those of the causal model: the bytes of a prefix are not predicted.
        return base.Objective.metrics(self, totals, examples)
