"""What the bars' programs hold and send, compiled for TPUs; `python -m tests.golden.pods` compiles them all anew.

It writes tests/golden/pods.json and the tables of docs/compile.md; `--only=NAME` does so for the cases whose names hold
NAME. Needs the extra `tpu`, and minutes for each case.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / 'pods.json'
PAGE = ROOT / 'docs' / 'compile.md'
BEGIN, END = '<!-- tables -->\n', '<!-- end of tables -->\n'

_BIG = (
    '--config=experiments/configs/transformer_big.py --topology=v5e:16x16 --config.mesh.data=256 '
    '--config.model.dtype=bfloat16 --config.data.source_length=2048 --config.data.target_length=2048 '
    '--config.data.batch_tokens=1048576 --config.data.row_multiple=256'
)
_7B = '--config=experiments/configs/llama2_7b.py --topology=v5p:4x4x4'
_70B = '--config=experiments/configs/llama2_70b.py --topology=v5p:4x8x8'
# Each bar as it fits, and without recomputation, where compiled FLOPs are held against the model's. Of 80 layers the
# compiler gives no program which does not fit.
BARS = {
    'transformer_big': f'{_BIG} --config.model.remat=full',
    'transformer_big, no remat': f'{_BIG} --config.model.remat=none',
    'llama2_7b': f'{_7B} --config.model.remat=full',
    'llama2_7b, no remat': f'{_7B} --config.model.remat=none',
    'llama2_70b': f'{_70B} --config.model.remat=full',
    'llama2_70b of 24 layers, no remat': f'{_70B} --config.model.num_layers=24 --config.model.remat=none',
}
MEMORY = {
    'memory: dots': f'{_7B} --config.model.remat=dots',
    'memory: offload': f'{_7B} --config.model.remat=offload',
    'memory: Adafactor': f'{_7B} --config.optimizer.name=adafactor --config.optimizer.b2=0.98 '
    '--config.optimizer.eps=1e-9 --config.optimizer.weight_decay=0',
    'memory: int8 moments': f'{_7B} --config.optimizer.moments=int8',
    'memory: bf16 parameters, fp32 masters': f'{_7B} --config.model.param_dtype=bfloat16 '
    '--config.optimizer.master=float32',
}
CASES = BARS | MEMORY
KEPT = (
    'topology', 'mesh', 'rows', 'lengths', 'parameter_bytes', 'optimizer_bytes', 'temporary_bytes', 'peak_bytes',
    'hbm_bytes', 'fits', 'model_flops', 'attention_flops', 'compiled_flops', 'flops_ratio', 'kernel_flops',
    'kernel_recomputed_flops', 'kernels', 'sent_bytes', 'least_bytes', 'bytes_ratio', 'step_seconds', 'mfu',
)  # fmt: skip


def compile_case(name: str) -> dict[str, Any]:
    """Returns the figures of one case, compiled now.

    Raises:
      RuntimeError: if it does not compile, so that no figure is lost for want of libtpu.
    """
    command = [sys.executable, '-m', 'experiments.compile', '--programs=train', '--json', *shlex.split(CASES[name])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().split('\n')[-1])
    report = json.loads(done.stdout.strip().split('\n')[-1])
    return {field: report[field] for field in KEPT}


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Returns the tables of docs/compile.md."""
    lines = [
        '| train step | GiB a chip: parameters, optimizer, temporaries | peak of HBM [GiB] | compiled / model FLOPs | '
        'sent [GiB] | sent / least | step (estimate) | MFU (estimate) |',
        '|---|---|---|--:|---|--:|--:|--:|',
        *(_row(name, found[name]) for name in BARS if name in found),
        '',
        'LLaMA-2-7B on `v5p:4x4x4` with each way of saving memory:',
        '',
        '| choice | parameters | optimizer | temporaries | peak [GiB] | compiled / model FLOPs |',
        '|---|--:|--:|--:|--:|--:|',
    ]
    shown = {'no remat': 'llama2_7b, no remat', 'remat full': 'llama2_7b'}
    shown |= {name.removeprefix('memory: '): name for name in MEMORY}
    for title, name in shown.items():
        if name in found:
            sizes = [_gib(found[name][f'{part}_bytes']) for part in ('parameter', 'optimizer', 'temporary', 'peak')]
            lines.append(f'| {title} | {" | ".join(sizes)} | {found[name]["flops_ratio"]:.3f} |')
    return '\n'.join(lines) + '\n'


def _row(name: str, case: dict[str, Any]) -> str:
    sizes = ', '.join(_gib(case[f'{part}_bytes']) for part in ('parameter', 'optimizer', 'temporary'))
    sent = ', '.join(f'{kind} {_gib(size)}' for kind, size in case['sent_bytes'].items() if size >= 2**20)
    peak = f'{_gib(case["peak_bytes"])} of {_gib(case["hbm_bytes"])}{"" if case["fits"] else ", does not fit"}'
    ratios = f'{case["flops_ratio"]:.3f} | {sent} | {case["bytes_ratio"]:.3f}'
    return (
        f'| {name}, `{case["topology"]}` | {sizes} | {peak} | {ratios} | {case["step_seconds"]:.2f} s | '
        f'{case["mfu"]:.2f} |'
    )


def _gib(size: float) -> str:
    return f'{size / 2**30:.2f}'


def main() -> None:
    """Compiles the cases, and renews the golden file and the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', default='')
    only = parser.parse_args().only
    for name in CASES:
        if only in name:
            found = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
            found[name] = compile_case(name)
            found = {name: found[name] for name in CASES if name in found}
            GOLDEN.write_text(json.dumps(found, indent=1) + '\n')
            print(name, found[name], flush=True)
            before, rest = PAGE.read_text().split(BEGIN)
            PAGE.write_text(before + BEGIN + tables(found) + END + rest.split(END)[1])


if __name__ == '__main__':
    main()
