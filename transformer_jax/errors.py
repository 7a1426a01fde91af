"""Errors which a user can cause, and choices by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a config, a file or an argument: one line saying what, where, and what would be right.

    Programs print it without a traceback and exit with status 1.
    """


def suggest(name: str, options: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the nearest of `options`, or the list of options when none is near."""
    options = sorted(str(option) for option in options)
    near = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; choose from {', '.join(options)}"


def choose(what: str, name: str, options: Iterable[str]) -> str:
    """Returns `name` if it is one of `options`.

    Raises:
      UserError: naming the nearest valid option.
    """
    options = tuple(options)
    if name not in options:
        raise UserError(f"{what} = '{name}' is unknown{suggest(name, options)}")
    return name
