"""Compile time of the train step for 6+6 and for 24+24 layers, scanned and unrolled.

Every measurement is a process of its own, and the depths take turns, so that the machine's drift hits all alike. Run
from the repository root with nothing else running:
    python -m benchmarks.compile_time --rounds=3 --output=compile_time.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import protocol
from benchmarks.shapes import Shapes, make_batches


def main() -> None:
    """Runs all measurements, or with --depth a single one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--depths', nargs='+', type=int, default=[6, 24], help='layers of each of the two stacks')
    parser.add_argument('--layer-stacks', nargs='+', default=['scan'], choices=('scan', 'unrolled'))
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--output', type=Path, help='also write everything here, as JSON')
    parser.add_argument('--depth', type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.depth:
        print(json.dumps(measure(arguments.depth, arguments.layer_stacks[0])))
        return
    print(protocol.machine_line())
    seconds: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for layer_stack in arguments.layer_stacks:
            for depth in arguments.depths:
                name = f'{depth}+{depth} {layer_stack}'
                seconds.setdefault(name, []).append(measure_apart(depth, layer_stack))
                print(f'  {name}: {seconds[name][-1]}', file=sys.stderr)
    print('| layers | trace and lower, s | compile, s | both, CPU seconds |\n|---|---|---|---|')
    for name, rounds in seconds.items():
        cells = [statistics.median(found[part] for found in rounds) for part in ('lower', 'compile', 'cpu')]
        print(f'| {name} | ' + ' | '.join(f'{cell:.1f}' for cell in cells) + ' |')
    if arguments.output:
        results = {'machine': protocol.machine(), 'seconds': seconds}
        arguments.output.write_text(json.dumps(results, indent=1) + '\n')


def measure_apart(depth: int, layer_stack: str) -> dict[str, float]:
    """Runs `measure` in a fresh process without a compilation cache."""
    command = [sys.executable, '-m', 'benchmarks.compile_time', f'--depth={depth}', '--layer-stacks', layer_stack]
    environment = os.environ | {'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    done = subprocess.run(command, cwd=protocol.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(depth: int, layer_stack: str) -> dict[str, float]:
    """Returns the seconds to trace and lower the train step, and to compile it, and the CPU seconds of both.

    CPU seconds stay the same where the machine is shared with others, wall seconds do not. Nothing is run.
    """
    import jax

    from benchmarks.ours import make_config, make_training, to_training_batch

    shapes = Shapes(num_layers=depth)
    train_step, make_state = make_training(make_config(shapes, 'float32', 0.1, layer_stack), shapes.learning_rate)
    state = jax.eval_shape(make_state, jax.random.key(0))
    batch = jax.eval_shape(lambda: to_training_batch(make_batches(shapes, count=1)[0]))
    cpu_start, start = time.process_time(), time.perf_counter()
    lowered = train_step.lower(state, batch)
    middle = time.perf_counter()
    lowered.compile()
    end, cpu = time.perf_counter(), time.process_time() - cpu_start
    return {'lower': round(middle - start, 2), 'compile': round(end - middle, 2), 'cpu': round(cpu, 2)}


if __name__ == '__main__':
    main()
