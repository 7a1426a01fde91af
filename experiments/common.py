"""What the programs share: flags, configs as ConfigDicts, one-line errors."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from ml_collections import config_dict, config_flags

from transformer_jax.errors import UserError, suggest
from transformer_jax.training.config import Experiment
from transformer_jax.training.host_cpu import tune_host_cpu

DEFAULT_CONFIG = str(Path(__file__).parent / 'configs' / 'default.py')

# ml_collections parses a value by its field's type, of which None is none.
_OVERRIDE = re.compile(r'--?(?:no)?config\.([^=]+)')
_NONE = re.compile(r'--?config\.([^=]+)=None$')
_nones: list[str] = []

# Dotted paths of the fields which the command line overrides.
overridden: list[str] = []

flags.DEFINE_bool('debug', False, 'show the traceback of an error instead of one line')


def to_config_dict(experiment: Experiment) -> config_dict.ConfigDict:
    """Returns an experiment as a ConfigDict, every field of which a flag can override, also one which is None.

    The model's vocabulary size is tied to that of the data: whichever is overridden, the other follows.
    """
    config = _group(experiment)
    config.model.vocab_size = config.data.get_ref('vocab_size')
    return config


def _group(values: Any) -> config_dict.ConfigDict:
    config = config_dict.ConfigDict()
    hints = typing.get_type_hints(type(values))
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        options = typing.get_args(hints[field.name])
        optional = typing.get_origin(hints[field.name]) in (types.UnionType, typing.Union) and type(None) in options
        if dataclasses.is_dataclass(value):
            config[field.name] = _group(value)
        elif optional:
            plain = options[0] in (int, float, str, bool)
            config[field.name] = config_dict.FieldReference(value, options[0] if plain else object)
        else:
            config[field.name] = value
    return config


def need_workdir() -> None:
    """Refuses to go on without the flag of a trained run's directory."""
    if flags.FLAGS.workdir is None:
        raise UserError('--workdir is missing; give the run directory of python -m experiments.train')


def define_config(default: str = DEFAULT_CONFIG) -> None:
    """Defines --config=file.py and --config.group.field=value."""
    _check_overrides(sys.argv[1:], Experiment().to_dict())
    overridden[:] = [match[1] for match in map(_OVERRIDE.match, sys.argv[1:]) if match]
    _nones[:] = [argument for argument in sys.argv[1:] if _NONE.match(argument)]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if not _NONE.match(argument)]
    config_flags.DEFINE_config_file('config', default, 'experiment, a file whose get_config() returns it')


def experiment() -> Experiment:
    """Returns the experiment which the flags describe.

    Raises:
      UserError: for a config file which cannot be read, or a value which does not fit.
    """
    try:
        values = flags.FLAGS.config.to_dict()
    except OSError as error:
        found = ', '.join(sorted(path.stem for path in Path(DEFAULT_CONFIG).parent.glob('[a-z]*.py')))
        path = config_flags.get_config_filename(flags.FLAGS['config'])
        raise UserError(f"--config = '{path}' cannot be read; in experiments/configs there are {found}") from error
    for argument in _nones:
        *groups, name = _NONE.match(argument)[1].split('.')
        functools.reduce(dict.__getitem__, groups, values)[name] = None
    return Experiment.from_dict(values)


def _check_overrides(arguments: list[str], known: dict[str, Any]) -> None:
    """Refuses an override of a field which does not exist, with the nearest name which does."""
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        group = known
        names = match[1].split('.') if match else []
        for depth, name in enumerate(names):
            if not isinstance(group, dict) or name not in group:
                path = '.'.join(['config', *names[: depth + 1]])
                raise UserError(f'--{path} is unknown{suggest(name, group) if isinstance(group, dict) else ""}')
            group = group[name]


def run(main: Callable[[], int | None], define: Callable[[], None] = lambda: None) -> None:
    """Parses the command line and runs `main`; a mistake of the user becomes one line and exit status 1."""
    app.define_help_flags()
    tune_host_cpu()
    try:
        define()
        left = flags.FLAGS(sys.argv)[1:]
        if left:
            raise UserError(f"'{left[0]}' is no flag; flags begin with --, see --help")
        sys.exit(main())
    except (UserError, flags.Error) as error:
        if '--debug' in sys.argv:
            raise
        print(f'error: {_one_line(error)}', file=sys.stderr)
        sys.exit(1)


def _one_line(error: Exception) -> str:
    return ' '.join(str(error).split())


def show_logs(show: Callable[[str], None]) -> None:
    """Passes log lines of this package, and warnings of all others, to `show`."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ours = record.name.startswith('transformer_jax')
            if ours or record.levelno >= logging.WARNING:
                show(f'{record.levelname.lower()}: {record.getMessage()}' if record.levelno > logging.INFO
                     else record.getMessage())  # fmt: skip

    logging.getLogger().handlers[:] = [Handler()]
    logging.getLogger('transformer_jax').setLevel(logging.INFO)
