"""What attention is asked to compute, as every back-end gets it."""

from __future__ import annotations

from typing import NamedTuple

import jax

from transformer_jax.ops.masks import Mask


class Dropout(NamedTuple):
    """The rate and key of dropout on attention weights."""

    rate: float
    key: jax.Array


class Inputs(NamedTuple):
    """The operands and choices of one call; `attention` says what they mean."""

    query_BTNH: jax.Array
    key_BSKH: jax.Array
    value_BSKH: jax.Array
    mask: Mask
    scale: float
    bias_BNTS: jax.Array | None = None
    softcap: float | None = None
    drop: Dropout | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.query_BTNH.shape[1], self.key_BSKH.shape[1]
