"""The page of claims, made of what each claim left beside its figure."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.claims import CLAIMS

CORRECTIONS = """\
## Where the texts are wrong

- *Post-LN is "x, sublayer, norm, +".* That is what Swin v2 and OLMo 2 do (`norm_position='res_post'`):
  x + norm(f(x)). The 2017 paper normalises after the sum, norm(x + f(x)) (`'post'`); pre-norm is x + f(norm(x)).
- *Multi-head attention has 786 K parameters with one head and 1 M with eight.* Both have 4 D² = 1,048,576 for D = 512:
  786,432 = 3 D² leaves out W_O, which a single head of full width has as well.
- *Without positions the output does not change when the input is permuted.* It is permuted alike (equivariance); only a
  pooled output does not change.
- *Attention is parallel, so its time does not depend on the length.* The number of sequential steps does not; the work
  grows with n², and so does the time once the machine is busy.
- *NTK-aware scaling sets the base to 500,000.* The base becomes base · s^(d/(d-2)) for a factor s and d rotated
  features.

## What is not here

Trainings on this page are short, so that all of it is measured within 45 minutes; longer ones with three seeds are
sweeps: [ablations.md](ablations.md). Longformer, BigBird, Performer and Mamba come later.
"""


def write_page(docs: Path) -> None:
    """Writes docs/claims.md from docs/figures/claim_*.json."""
    found = {}
    for name in CLAIMS:
        path = docs / 'figures' / f'claim_{name}.json'
        if path.is_file():
            found[name] = json.loads(path.read_text())
    machines = sorted({values['machine'] for values in found.values() if values['machine']})
    lines = [
        '# Claims, measured\n',
        'Made by `python -m experiments.claims`; each section is one file of `experiments/claims/`, run alone by '
        '`--only=NAME`.' + (f' Machine: {machines[0]}.' if len(machines) == 1 else '') + '\n',
        '| claim | verdict | wall seconds |',
        '|---|---|--:|',
        *(f'| [{name}](#{name}) | {values["verdict"]} | {values["seconds"]:.0f} |' for name, values in found.items()),
        f'| all | | {sum(values["seconds"] for values in found.values()):.0f} |',
        '',
    ]
    for name, values in found.items():
        lines += [
            f'## {name}\n',
            f'> {values["claim"]}\n',
            f'**{values["verdict"].capitalize()}.** {values["measured"]}\n',
            *([f'Machine: {values["machine"]}.\n'] if len(machines) > 1 and values['machine'] else []),
            f'![{name}](figures/claim_{name}.png)\n',
        ]
    (docs / 'claims.md').write_text('\n'.join([*lines, CORRECTIONS]))
