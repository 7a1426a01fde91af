"""How one tensor of theirs becomes one or several parameters of ours, written once and read in both directions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


class Rearrange:
    """A rearrangement of axes named by letters, such as '(N H) D -> D N H'.

    Parentheses join axes into one, the last running fastest. An axis `q` on our side, always the first, stands for
    several parameters of ours held in one tensor of theirs: '(N q H) D -> q D N H' are queries, keys and values which
    lie head by head in one matrix. `1` is an axis of theirs of length 1. Reading
    goes from left to right, writing from right to left; both only move numbers.
    """

    def __init__(self, spec: str):
        theirs, ours = spec.split(' -> ') if '->' in spec else (spec, spec)
        self.groups = [part.replace('1', '').split() for part in _split(theirs)]
        self.ours = ours.split()
        self.letters = [letter for group in self.groups for letter in group]

    def theirs_shape(self, ours: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns the shape of their tensor which belongs to the shapes of ours."""
        size = self._sizes(ours)
        return tuple(math.prod(size[letter] for letter in group) for group in self.groups)

    def read(self, tensor: np.ndarray, ours: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns our parameters, of the given shapes, from their tensor."""
        size = self._sizes(ours)
        apart = tensor.reshape([size[letter] for letter in self.letters])
        moved = apart.transpose([self.letters.index(letter) for letter in self.ours])
        return list(moved) if self.ours[0] == 'q' else [moved]

    def write(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """Returns their tensor from our parameters."""
        shape = self.theirs_shape([parameter.shape for parameter in parameters])
        joined = np.stack(parameters) if self.ours[0] == 'q' else parameters[0]
        return joined.transpose([self.ours.index(letter) for letter in self.letters]).reshape(shape)

    def _sizes(self, ours: Sequence[Sequence[int]]) -> Mapping[str, int]:
        shape = (len(ours), *ours[0]) if self.ours[0] == 'q' else ours[0]
        return dict(zip(self.ours, shape, strict=True))


def _split(text: str) -> list[str]:
    """'(N H) D' -> ['N H', 'D']."""
    parts, inside = [], None
    for word in text.replace('(', '( ').replace(')', ' )').split():
        if word == '(':
            inside = []
        elif word == ')':
            parts.append(' '.join(inside))
            inside = None
        elif inside is not None:
            inside.append(word)
        else:
            parts.append(word)
    return parts
