"""Flags of a search: one for each field of DecodeConfig, by its name."""

from __future__ import annotations

import ast
import dataclasses
import types
import typing
from typing import Any

from absl import flags

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError

_DEFINE = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
# What a program for text has no use for.
_LEFT_OUT = ('return_log_probs',)
_HINTS = typing.get_type_hints(DecodeConfig)
_FIELDS = [field.name for field in dataclasses.fields(DecodeConfig) if field.name not in _LEFT_OUT]


def define() -> None:
    """Defines a flag for each field, None meaning as the run has it."""
    for name in _FIELDS:
        kind = next((option for option in _options(name) if option in _DEFINE), None)
        if kind is None:
            flags.DEFINE_string(name, None, 'search: ids such as 3,4 or [3,(4,5)], see DecodeConfig')
        else:
            _DEFINE[kind](name, None, 'search, see DecodeConfig')


def changed(config: DecodeConfig) -> DecodeConfig:
    """Returns a search with the changes which the flags ask for.

    Raises:
      UserError: for values which do not go together, or ids which cannot be read.
    """
    changes = {name: flags.FLAGS[name].value for name in _FIELDS if flags.FLAGS[name].value is not None}
    for name, value in changes.items():
        if isinstance(value, str) and str not in _options(name):
            changes[name] = _ids(name, value)
    return config.replace(**changes)


def _options(name: str) -> tuple[Any, ...]:
    hint = _HINTS[name]
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _ids(name: str, text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise UserError(f"--{name} = '{text}' cannot be read; ids are written as 3,4 or [3,(4,5)]") from error
    return value if isinstance(value, (list, tuple)) else (value,)
