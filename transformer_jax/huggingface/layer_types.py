"""Lists with an entry per layer in config.json, and the repeating pattern which they are here."""

from __future__ import annotations

from collections.abc import Sequence

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError, suggest

_TYPES = {'full_attention': 'global', 'sliding_attention': 'local'}


def read_pattern(types: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern which, repeated, gives every layer's kind.

    Raises:
      UserError: for a type which is not supported.
    """
    for name in types:
        if name not in _TYPES:
            raise UserError(f"layer_types holds '{name}', which is not supported{suggest(name, _TYPES)}")
    kinds = tuple(_TYPES[name] for name in types)
    period = next(p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds))))
    return kinds[:period]


def write_types(config: ModelConfig) -> list[str]:
    """Returns an entry per layer."""
    names = {ours: theirs for theirs, ours in _TYPES.items()}
    pattern = config.layer_pattern
    return [names[pattern[i % len(pattern)]] for i in range(config.num_layers)]
