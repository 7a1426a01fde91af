"""What measuring a claim ends in: a number, a figure, and whether the claim holds here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transformer_jax.analysis.sweep_figures import Bar

HOLDS, FAILS, PARTLY = 'holds here', 'does not hold here', 'holds in part'


class Finding(NamedTuple):
    """A claim as the texts make it, what was measured in words and numbers, and the verdict."""

    claim: str
    measured: str
    verdict: str


def verdict(*held: bool) -> str:
    """Returns the verdict on a claim whose parts were found to hold or not."""
    return HOLDS if all(held) else PARTLY if any(held) else FAILS


def bars(values: Mapping[str, float], baseline: str | None = None) -> list[Bar]:
    """Returns single measurements as bars, without interval."""
    return [Bar(name, value, math.nan, (), name == baseline) for name, value in values.items()]


def seed_bars(
    found: Mapping[str, Sequence[Mapping[str, float]]], metric: str = 'loss', scale: float = 1.0
) -> list[Bar]:
    """Returns a metric of trainings as bars: the mean over seeds, and each seed; for an interval they are too few."""
    arms = {name: [scale * run[metric] for run in runs] for name, runs in found.items()}
    return [Bar(name, math.fsum(values) / len(values), math.nan, tuple(values), False) for name, values in arms.items()]
