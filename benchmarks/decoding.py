"""Decoding throughput beside Hugging Face `generate` and CTranslate2: the same random weights, inputs and lengths.

Run from the repository root, with the extra `benchmarks` installed and nothing else running:
    python -m benchmarks.decoding --rounds=5 --output=decoding.json
A contestant is ours:PRECISION, huggingface:PRECISION or ctranslate2:PRECISION, where the last may state its workers and
threads, ctranslate2:int8:2x1; by default one of one thread for batch 1, else two of one, its best on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import protocol
from benchmarks.decoding_jobs import JOBS, Job

PRECISIONS = {
    'ours': ('float32', 'bfloat16'),
    'huggingface': ('float32', 'bfloat16'),
    'ctranslate2': ('float32', 'int8'),
}
PEERS = [f'{name}:{precision}' for name, precisions in PRECISIONS.items() for precision in precisions]
OURS, BASE = PEERS[0], PEERS[2]


def main() -> None:
    """Runs the referee, or with --peer one worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--jobs', nargs='+', choices=JOBS, default=list(JOBS))
    parser.add_argument('--peers', nargs='+', default=PEERS, help=f'of {", ".join(PEERS)}')
    parser.add_argument('--rounds', type=int, default=5, help='clean rounds wanted in each job')
    parser.add_argument('--calls', type=int, default=3, help='calls of each in a round; their median counts')
    parser.add_argument('--warm-up', type=int, default=2, help='calls of each contestant before the first round')
    parser.add_argument('--models', type=Path, help='folder in which the random models are kept (default: none is)')
    parser.add_argument('--output', type=Path, help='also write everything here, as JSON')
    parser.add_argument('--peer', help=argparse.SUPPRESS)
    parser.add_argument('--write', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for peer in arguments.peers:
        name, _, precision = peer.partition(':')
        if precision.split(':')[0] not in PRECISIONS.get(name, ()):
            parser.error(f"--peers: '{peer}' is unknown; known are {', '.join(PEERS)}")
    if arguments.write:
        from benchmarks.decoding_huggingface import write_model

        write_model(arguments.write, arguments.models / arguments.write)
    elif arguments.peer:
        work(arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            referee(arguments, arguments.models or Path(folder))


def work(arguments: argparse.Namespace) -> None:
    """One contestant."""
    [number] = arguments.jobs
    job = JOBS[number]
    name, precision, *rest = arguments.peer.split(':')
    folder = arguments.models / job.shape
    run, facts = make_generate(name, job, precision, folder, rest[0] if rest else '')

    def run_step(step: int) -> float:
        del step
        facts['tokens'] = run().tolist()
        return 0.0

    run_step(0)
    protocol.serve(run_step, facts, arguments.warm_up - 1)


def make_generate(
    name: str, job: Job, precision: str, folder: Path, threads: str
) -> tuple[Callable[[], np.ndarray], dict]:
    """Returns `run() -> tokens` and facts of a contestant; each imports only its own framework."""
    if name == 'ours':
        from benchmarks.decoding_ours import make_generate
        from transformer_jax.training.host_cpu import tune_host_cpu

        tune_host_cpu()  # as the programs of experiments/ do

        return make_generate(job, precision, folder)
    if name == 'huggingface':
        from benchmarks.decoding_huggingface import make_generate

        return make_generate(job, precision, folder)
    from benchmarks.decoding_ctranslate2 import make_generate

    count, each = map(int, (threads or ('1x1' if job.batch == 1 else '2x1')).split('x'))
    return make_generate(job, precision, folder, count, each)


def referee(arguments: argparse.Namespace, folder: Path) -> None:
    """Writes the models, races each job and prints the table."""
    results = {'machine': protocol.machine(), 'jobs': {}}
    for shape in sorted({JOBS[name].shape for name in arguments.jobs}):
        if not (folder / shape / 'ctranslate2').exists():
            options = [f'--write={shape}', f'--models={folder}']
            subprocess.run([sys.executable, '-m', 'benchmarks.decoding', *options], cwd=protocol.ROOT, check=True)
    print(protocol.machine_line())
    versions = {}
    for name in arguments.jobs:
        options = ['--jobs', name, f'--models={folder}', f'--warm-up={arguments.warm_up}']
        race = 'benchmarks.decoding', arguments.peers, options, arguments.rounds, arguments.calls
        result, facts = protocol.hold(*race)
        results['jobs'][name] = result | {'facts': facts}
        for fact in facts.values():
            versions |= fact['versions']
        print(format_table(name, JOBS[name], result, facts), flush=True)
    print('versions:', json.dumps(versions))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + '\n')


def format_table(name: str, job: Job, result: dict, facts: dict) -> str:
    """Returns tokens/s by medians; ratios to Hugging Face fp32 and ours fp32 over each as medians of rounds' ratios.

    The last column is the share of generated tokens equal to those of Hugging Face fp32.
    """
    rows = result['workers']
    lines = [f'\n{name} ({protocol.note(result)})']
    lines.append('| contestant | tokens/s | it / HF fp32 | ours fp32 / it | same tokens |')
    lines.append('|---' * 5 + '|')
    for peer, row in rows.items():
        cells = [peer, f'{job.tokens / statistics.median(row["seconds"]):,.0f}']
        cells += [_ratio(rows, BASE, peer), _ratio(rows, peer, OURS)]
        same = np.mean(np.array(facts[peer]['tokens']) == facts[BASE]['tokens']) if BASE in facts else np.nan
        lines.append('| ' + ' | '.join([*cells, f'{same:.0%}']) + ' |')
    return '\n'.join(lines)


def _ratio(rows: dict, slower: str, faster: str) -> str:
    if slower not in rows or faster not in rows:
        return ''
    pairs = zip(rows[slower]['seconds'], rows[faster]['seconds'], strict=True)
    return f'{statistics.median(theirs / own for theirs, own in pairs):.2f}'


if __name__ == '__main__':
    main()
