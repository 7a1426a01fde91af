"""Checks what a finished run left in its directory: a result with finite scores, samples, pictures, checkpoints."""

import json
import math
import sys
from pathlib import Path

KEPT = (
    'config.json', 'model.json', 'tokenizer.model', 'metrics.jsonl', 'samples.txt', 'plots/*.png', 'checkpoints/*',
)  # fmt: skip


def main(directory: Path) -> None:
    result = json.loads((directory / 'result.json').read_text())
    for split in ('valid', 'test'):
        loss = result[split]['loss']
        if not math.isfinite(loss):
            sys.exit(f'{split} loss in {directory}/result.json is {loss}')
    for pattern in KEPT:
        files = [path for path in directory.glob(pattern) if path.is_dir() or path.stat().st_size]
        if not files:
            sys.exit(f'the run left no {pattern} in {directory}, or an empty one')
    print(f'{directory.name}: step {result["step"]}, test {result["test"]}')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
