"""Masked language model (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import planner, ragged, sources, tokenizers
from transformer_jax.data.objectives import base

_MASKED, _MASKED_OR_RANDOM = 0.8, 0.9


class MaskedLM(base.Objective):
    """Chosen tokens from all the others: each ordinary token is chosen with probability `mask_rate`.

    Of the chosen, 80 % become the mask id, 10 % a random ordinary id and 10 % stay. Special ids and padding are never
    chosen. A piece's choice is drawn from (seed, epoch, piece): new every epoch, the same on every host. Texts are cut
    into pieces of at most `source_length` tokens, start and end marks included, of which nothing is lost.

    Batches hold tokens, mask and, when packed, positions and segment_ids (BS int32); labels BS are the original ids
    where chosen and `pad_id` elsewhere; weights BS are 1 where chosen.

    Raises:
      UserError: for a vocabulary without start id or mask symbol.
    """

    name, kind = 'masked_lm', 'encoder'

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: data_config.DataConfig, model: ModelConfig | None = None
    ):
        super().__init__(tokenizer, config, model)
        self.mask_id = tokenizer.symbol(data_config.MASK)
        self._frame = base.frame_ids(tokenizer)

    def encode(self, source: sources.Source, training: bool) -> base.Examples:
        del training  # Nothing is left out.
        start, end = self._frame
        pieces = base.cut(self._tokenizer, source, self.widths[0] - 2)
        stream = ragged.Ragged.join([start, *tokens, end] for tokens in pieces.tokens)
        return base.Examples((stream,), pieces.ids, len(pieces.ids))

    def batch(self, examples: base.Examples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        (stream,) = examples.streams
        drawn = [self._corrupt(stream[example], random) for example, random in base.generators(plan, seed)]
        every, pad = np.arange(len(drawn)), self._tokenizer.pad_id
        rows, labels, chosen = (
            ragged.fill_rows(ragged.Ragged.join(part), every, plan.offsets, plan.widths[0], empty)
            for part, empty in (
                ([tokens for tokens, _, _ in drawn], pad),
                ([labels for _, labels, _ in drawn], pad),
                ([chosen for _, _, chosen in drawn], 0),
            )
        )
        inputs = base.place(rows, rows.tokens, packed)
        return {'inputs': inputs, 'labels': labels.tokens, 'weights': chosen.tokens.astype(np.float32)}

    def _corrupt(self, tokens: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (what the model reads, what it learns, 1 where it learns)."""
        ordinary = self._tokenizer.ordinary_ids
        chosen = (random.random(len(tokens)) < self._config.mask_rate) & np.isin(tokens, ordinary)
        kind = random.random(len(tokens))
        other = np.where(kind < _MASKED_OR_RANDOM, random.choice(ordinary, len(tokens)), tokens)
        read = np.where(chosen, np.where(kind < _MASKED, self.mask_id, other), tokens)
        return read, np.where(chosen, tokens, self._tokenizer.pad_id), chosen.astype(np.int32)
