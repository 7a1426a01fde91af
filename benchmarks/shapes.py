"""What every contestant trains on: one set of dimensions, one set of batches."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shapes:
    """transformer_base of the paper (section 5.2) with a vocabulary of 8000; 2,048 tokens a step."""

    num_layers: int = 6  # in the encoder, and again in the decoder
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    vocab_size: int = 8000
    batch: int = 16
    source_length: int = 64
    target_length: int = 64
    learning_rate: float = 1e-4

    @property
    def tokens_per_step(self) -> int:
        """Source and target tokens."""
        return self.batch * (self.source_length + self.target_length)


def make_batches(shapes: Shapes, count: int = 4) -> list[dict[str, np.ndarray]]:
    """Returns `count` batches of int32 ids, unpadded: source (B, S), target (B, T) shifted right, labels (B, T)."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        source_BS = rng.integers(4, shapes.vocab_size, (shapes.batch, shapes.source_length), dtype=np.int32)
        labels_BT = rng.integers(4, shapes.vocab_size, (shapes.batch, shapes.target_length), dtype=np.int32)
        target_BT = np.concatenate([np.zeros_like(labels_BT[:, :1]), labels_BT[:, :-1]], axis=1)
        batches.append({'source': source_BS, 'target': target_BT, 'labels': labels_BT})
    return batches
