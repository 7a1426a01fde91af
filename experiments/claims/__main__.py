"""Measures the claims and writes the page of them: python -m experiments.claims [--only=scale,padding] [--docs=docs].

Each claim is a file of this folder whose measure(figure) draws a figure and returns a Finding. What was measured
before stays on the page until it is measured again.
"""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path

from absl import flags

from experiments import common
from experiments.claims import CLAIMS
from experiments.claims.page import write_page
from experiments.screen import Screen, duration
from transformer_jax.errors import choose

flags.DEFINE_list('only', None, 'names of claims (default: all)')
flags.DEFINE_string('docs', 'docs', 'directory of claims.md and figures/')
flags.DEFINE_string('machine', None, 'what the figures were measured on, in words, for the page')


def main() -> int:
    """Measures one claim after another and renews the page after each."""
    options, screen = flags.FLAGS, Screen()
    names = [choose('--only', name, CLAIMS) for name in options.only] if options.only else list(CLAIMS)
    docs = Path(options.docs)
    figures = docs / 'figures'
    figures.mkdir(parents=True, exist_ok=True)
    for name in names:
        begin = time.monotonic()
        screen.live(f'{name} ...')
        finding = importlib.import_module(f'experiments.claims.{name}').measure(str(figures / f'claim_{name}.png'))
        seconds = time.monotonic() - begin
        values = {**finding._asdict(), 'seconds': seconds, 'machine': options.machine}
        (figures / f'claim_{name}.json').write_text(json.dumps(values, indent=2) + '\n')
        write_page(docs)
        screen.message(f'{name} ({duration(seconds)}): {finding.verdict}: {finding.measured}')
    return 0


if __name__ == '__main__':
    common.run(main)
