"""Intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % interval; `half` is NaN for fewer than two values."""

    mean: float
    half: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return abs(self.mean) > self.half


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of n values and t_{0.975, n-1} s / sqrt(n), s their standard deviation (Student 1908)."""
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan)
    if n == 1:
        return Interval(float(values[0]), math.nan)
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    return Interval(float(np.mean(values)), float(quantile * np.std(values, ddof=1) / math.sqrt(n)))
