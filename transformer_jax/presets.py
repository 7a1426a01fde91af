"""Named architectures."""

from __future__ import annotations

from typing import Any

from transformer_jax.config import ModelConfig
from transformer_jax.errors import choose

# Vaswani et al. 2017, table 3.
_TRANSFORMER_BIG = dict(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)

PRESETS: dict[str, dict[str, Any]] = {
    'transformer_base': {},
    'transformer_big': _TRANSFORMER_BIG,
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """Returns the ModelConfig of a named architecture, with some choices changed.

    Raises:
      UserError: for an unknown preset or choice, with the nearest valid name.
    """
    return ModelConfig(**PRESETS[choose('preset', name, PRESETS)]).replace(**changes)
