"""Translation (Vaswani et al. 2017, section 5.1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import planner, ragged, sources, tokenizers
from transformer_jax.data.objectives import base


class Translation(base.Objective):
    """Source to target, teacher-forced: the decoder reads the start id and y_1 ... y_n and learns y_1 ... y_n and EOS.

    A batch holds, with S and T the widths of its rows:
      inputs: source_tokens BS (each sentence ends with EOS), target_tokens BT (labels shifted right inside each
        sentence, the decoder start id in front), source_mask BS and target_mask BT (1 at tokens); when packed, also
        source_positions, target_positions (from 0 in each sentence) and source_segment_ids, target_segment_ids (pairs
        of a row numbered from 1, 0 at padding). All int32.
      labels: BT int32, `pad_id` at padding.
      weights: BT float32, 1 at labels (EOS included), 0 at padding.

    Training leaves out pairs with an empty side; evaluation keeps them, with EOS alone on that side. Both are counted.

    Raises:
      UserError: for decoder_start 'bos' with a vocabulary which has no start id.
    """

    name, kind, references = 'translation', 'encoder_decoder', True

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: data_config.DataConfig, model: ModelConfig | None = None
    ):
        super().__init__(tokenizer, config, model)
        self.decoder_start_id = base.decoder_start_id(tokenizer, config)

    def encode(self, source: sources.Source, training: bool) -> base.Examples:
        chunks: tuple[list[ragged.Ragged], list[ragged.Ragged]] = ([], [])
        ids, truncated, too_long, empty = [], 0, 0, 0
        for start, pairs in base.chunks(source, ('source', 'target')):
            tokens = [self._tokenizer.encode_all([pair[side] for pair in pairs]) for side in ('source', 'target')]
            lengths = np.array([[len(sequence) + 1 for sequence in side] for side in tokens])
            blank = (lengths == 1).any(axis=0)
            long = (lengths > np.array(self.widths)[:, None]).any(axis=0)
            keep = np.ones(len(pairs), bool)
            if training:
                keep &= ~blank
                empty += int(blank.sum())
                if self._config.too_long == 'skip':
                    too_long += int((keep & long).sum())
                    keep &= ~long
            truncated += int((keep & long).sum())
            kept = np.flatnonzero(keep)
            ids.append(kept + start)
            for side, limit, chunk in zip(tokens, self.widths, chunks, strict=True):
                chunk.append(ragged.Ragged.join(side[i][: limit - 1] + [self._tokenizer.eos_id] for i in kept))
        streams = tuple(ragged.Ragged.concatenate(chunk) for chunk in chunks)
        return base.Examples(streams, np.concatenate(ids), len(source), truncated, too_long, empty)

    def batch(self, examples: base.Examples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        del seed  # Nothing is drawn at random.
        return base.teacher_forced(examples.streams, plan, packed, self.decoder_start_id, self._tokenizer.pad_id)
