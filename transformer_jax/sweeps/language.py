"""A sweep as data: named points, each a set of overrides of a config, and the algebra which makes lists of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from transformer_jax.errors import UserError, suggest
from transformer_jax.training.config import Experiment, to_plain


@dataclasses.dataclass(frozen=True)
class Point:
    """One arm of a sweep: a name, and the fields which it changes, by dotted path: {'model.num_heads': 4}."""

    name: str
    overrides: Mapping[str, Any]


Points = tuple[Point, ...]


def axis(path: str, values: Iterable[Any]) -> Points:
    """Returns one point for each value of the field at `path`, named `field=value`."""
    field = path.rpartition('.')[2]
    return tuple(Point(f'{field}={_shown(value)}', {path: value}) for value in values)


def variants(named: Mapping[str, Mapping[str, Any]]) -> Points:
    """Returns one point for each name, which changes the fields given."""
    return tuple(Point(name, dict(overrides)) for name, overrides in named.items())


def product(*lists: Points) -> Points:
    """Returns every combination of one point of each list, the last list varying fastest.

    Raises:
      UserError: if two lists change the same field, so that one value would shadow the other.
    """
    return tuple(_joined(points) for points in itertools.product(*lists))


def zip_equal(*lists: Points) -> Points:
    """Returns the first points of all lists joined, then the second ones, and so on.

    Raises:
      UserError: if the lists are not equally long, or two change the same field.
    """
    if len({len(points) for points in lists}) > 1:
        lengths = ', '.join(str(len(points)) for points in lists)
        raise UserError(f'zip_equal joins lists of one length, but these have {lengths} points')
    return tuple(_joined(points) for points in zip(*lists, strict=True))


def chain(*lists: Points) -> Points:
    """Returns the points of all lists, one list after the other."""
    return tuple(itertools.chain(*lists))


def overlay(base: Experiment, overrides: Mapping[str, Any]) -> Experiment:
    """Returns the experiment with the fields at these dotted paths changed.

    A field which is None can be given a value, and one which may be None can be made so; a whole group can be given as
    a dictionary. Where the data's vocabulary size is changed, the model's follows, as it does for flags.

    Raises:
      UserError: for a path which does not exist, with the nearest one which does; for a value which does not fit; for
        two paths of which one lies within the other.
    """
    _check_nested(overrides)
    values = base.to_dict()
    if 'data.vocab_size' in overrides and 'model.vocab_size' not in overrides:
        overrides = {**overrides, 'model.vocab_size': overrides['data.vocab_size']}
    for path, value in overrides.items():
        *groups, name = path.split('.')
        group, passed = values, 'config'
        for step in groups:
            _check_step(group, step, passed)
            group, passed = group[step], f'{passed}.{step}'
        _check_step(group, name, passed)
        group[name] = to_plain(value)
    return Experiment.from_dict(values)


def _check_step(group: Any, name: str, passed: str) -> None:
    if not isinstance(group, dict):
        raise UserError(
            f'{passed}.{name} cannot be overridden: {passed} '
            + ('is None; override the whole group' if group is None else f'is {group!r}, not a group of fields')
        )
    if name not in group:
        raise UserError(f'{passed}.{name} is unknown{suggest(name, group)}')


def _check_nested(overrides: Mapping[str, Any]) -> None:
    for path, other in itertools.permutations(overrides, 2):
        if other.startswith(f'{path}.'):
            raise UserError(f'{path} and {other} are both overridden, but one lies within the other')


def _joined(points: tuple[Point, ...]) -> Point:
    overrides: dict[str, Any] = {}
    for point in points:
        for path, value in point.overrides.items():
            if path in overrides:
                raise UserError(f'{path} is changed twice, to {overrides[path]!r} and to {value!r}; keep one')
            overrides[path] = value
    _check_nested(overrides)
    return Point(', '.join(point.name for point in points if point.name), overrides)


def _shown(value: Any) -> str:
    return f'{value:g}' if isinstance(value, float) else str(value)
