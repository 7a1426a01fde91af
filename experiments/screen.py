"""What a person sees while a run goes on: messages, and one live line below them."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO


def duration(seconds: float) -> str:
    """Returns 75 as 1:15 and 4000 as 1:06:40."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'


def quantity(value: float) -> str:
    """Returns 12345 as 12.3k and 2.5e10 as 25.0G."""
    for size, letter in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if value >= size:
            return f'{value / size:.1f}{letter}'
    return f'{value:.1f}'


class Screen:
    """A live line which is rewritten in place on a terminal, and printed anew elsewhere."""

    def __init__(self, stream: TextIO = sys.stdout):
        self._stream, self._live, self._width = stream, stream.isatty(), 0

    def message(self, text: str) -> None:
        """Prints lines which stay, above the live line."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def live(self, text: str) -> None:
        """Shows the live line."""
        if self._live:
            self._clear()
            text = text[: shutil.get_terminal_size().columns - 1]  # a line which wraps could not be rewritten
            print(text, end='\r', file=self._stream, flush=True)
            self._width = len(text)
        else:
            print(text, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._width:
            print(' ' * self._width, end='\r', file=self._stream)
            self._width = 0


class TrainingScreen(Screen):
    """The live line of a training run."""

    def __init__(self, steps: int, unit: str = 'target tokens', stream: TextIO = sys.stdout):
        super().__init__(stream)
        self._steps, self._unit = steps, unit

    def report(self, step: int, values: dict[str, float]) -> None:
        """Shows step, loss, rate, speed in what the loss counts, padding share, model FLOP/s and time left."""
        self.live(
            f'step {step}/{self._steps}  loss {values["loss"]:.3f}  rate {values["rate"]:.2e}  '
            f'{quantity(values["tokens_per_second"])} {self._unit}/s  padding {values["padding_share"]:.0%}  '
            f'{quantity(values["flops_per_second"])}FLOP/s  '
            f'left {duration((self._steps - step) * values["seconds_per_step"])}'
        )


class Counter:
    """A live line on standard error which counts sentences and their speed."""

    def __init__(self, total: int, what: str = 'sentences'):
        self._screen, self._total, self._what = Screen(sys.stderr), total, what
        self._done, self._begin = 0, time.monotonic()

    def add(self, count: int) -> None:
        """Hears that `count` more are done."""
        self._done += count
        speed = self._done / max(time.monotonic() - self._begin, 1e-9)
        self._screen.live(f'{self._done}/{self._total} {self._what}  {speed:.1f} {self._what}/s')

    def close(self) -> None:
        """Leaves the last count standing."""
        if self._total:
            self._screen.message(f'{self._done} {self._what} in {duration(time.monotonic() - self._begin)}')
