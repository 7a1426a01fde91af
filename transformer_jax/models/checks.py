"""Checks on inputs which are made on the host, where their values are known."""

from __future__ import annotations

import jax
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError


def check_tokens(tokens: jax.Array, rows: int, what: str = 'token id'):
    """Checks that indices lie in a table.

    Inside jit nothing is known of the values and nothing is checked; an index past the end then gives NaN.

    Raises:
      UserError: naming the value and the size of the table.
    """
    if isinstance(tokens, jax.core.Tracer) or tokens.size == 0:
        return
    values = np.asarray(tokens)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= rows:
        raise UserError(f'{what} {low if low < 0 else high} is outside the table of {rows} rows (0 to {rows - 1})')


def check_length(config: ModelConfig, positions_BT: jax.Array | None, T: int):
    """Checks that no position lies past `max_positions`; positions not given are 0 ... T - 1 at most.

    Raises:
      UserError: naming both numbers.
    """
    if config.max_positions is None:
        return
    if positions_BT is not None:
        check_tokens(positions_BT, config.max_positions, 'position')
    elif T > config.max_positions:
        raise UserError(f'a sequence of {T} tokens is longer than max_positions = {config.max_positions}')
