"""Interleaved measurement: every contestant in a process of its own, taking turns.

The speed of a shared machine drifts by a fifth within an hour, so only ratios of figures taken side by side are
evidence. A contestant is a worker process that builds its training step, warms it up and then waits; the referee asks
one worker at a time for a few steps, in rounds whose order rotates. Messages are JSON, one a line, over pipes:

    worker  -> {"ready": {...facts about the contestant...}}
    referee -> {"steps": 3}
    worker  -> {"seconds": [...], "cpu_seconds": ..., "loss": ...}
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def serve(run_step: Callable[[int], float], facts: dict, warm_up: int) -> None:
    """Answers a referee on standard input and output until it closes the pipe.

    Args:
      run_step: runs step i to its end, parameters written, and returns the loss.
      facts: what the referee should print about this contestant, such as versions and parameter count.
      warm_up: steps run before `ready` is sent.
    """
    replies = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not be taken for a reply
    for step in range(warm_up):
        run_step(step)
    print(json.dumps({'ready': facts}), file=replies)
    step = warm_up
    for line in sys.stdin:
        seconds = []
        cpu_start = time.process_time()
        for _ in range(json.loads(line)['steps']):
            start = time.perf_counter()
            loss = run_step(step)
            seconds.append(time.perf_counter() - start)
            step += 1
        reply = {'seconds': seconds, 'cpu_seconds': time.process_time() - cpu_start, 'loss': loss}
        print(json.dumps(reply), file=replies)


@dataclasses.dataclass
class Turn:
    """One worker's steps in one round. `disturbance` is the share of the machine that others used meanwhile."""

    seconds_per_step: float
    disturbance: float
    loss: float


class Worker:
    """A contestant's process as the referee sees it."""

    def __init__(self, module: str, name: str, arguments: Sequence[str] = ()):
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, '-m', module, f'--peer={name}', *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> dict:
        """Returns the contestant's facts."""
        return self._read()['ready']

    def take_turn(self, steps: int) -> Turn:
        """Lets the worker run `steps` steps while all others wait."""
        busy_start, start = _busy_seconds(), time.perf_counter()
        self._process.stdin.write(json.dumps({'steps': steps}) + '\n')
        self._process.stdin.flush()
        reply = self._read()
        elapsed = time.perf_counter() - start
        others = _busy_seconds() - busy_start - reply['cpu_seconds']
        return Turn(statistics.median(reply['seconds']), others / (elapsed * os.cpu_count()), reply['loss'])

    def close(self) -> None:
        """Ends the worker by closing its input; kills it if it does not listen."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f'{self.name} ended before it answered (exit status {self._process.wait()})')
        return json.loads(line)


def race(workers: Sequence[Worker], rounds: int, steps: int, quiet_share: float = 0.05) -> dict:
    """Runs rounds until `rounds` of them are clean, at most twice as many, and returns each worker's figures.

    A round is clean when during none of its turns other processes, or the hypervisor, used more than `quiet_share` of
    the machine. If too few rounds are clean, the figures come from all of them and `clean_rounds` says so.

    Returns:
      {'clean_rounds', 'rounds', 'workers': {name: {'seconds': per-round list, 'loss': last}}}
    """
    history: list[dict[str, Turn]] = []
    clean: list[dict[str, Turn]] = []
    while len(clean) < rounds and len(history) < 2 * rounds:
        shift = len(history) % len(workers)
        turns = {}
        for worker in [*workers[shift:], *workers[:shift]]:
            time.sleep(0.3)  # lets the threads of the one before fall asleep
            turns[worker.name] = worker.take_turn(steps)
        history.append(turns)
        if all(turn.disturbance <= quiet_share for turn in turns.values()):
            clean.append(turns)
        worst = max(turn.disturbance for turn in turns.values())
        shown = '  '.join(f'{name} {turn.seconds_per_step:.3f}' for name, turn in sorted(turns.items()))
        print(f'  round {len(history)}: {shown}  (others at most {worst:.0%})', file=sys.stderr)
    counted = clean if len(clean) >= min(rounds, 3) else history
    return {
        'clean_rounds': len(clean),
        'rounds': len(history),
        'workers': {
            worker.name: {
                'seconds': [turns[worker.name].seconds_per_step for turns in counted],
                'loss': history[-1][worker.name].loss,
            }
            for worker in workers
        },
    }


def hold(module: str, peers: Sequence[str], options: Sequence[str], rounds: int, steps: int) -> tuple[dict, dict]:
    """Starts a worker for each peer, lets them race, and ends them; returns `race`'s result and the facts by peer."""
    workers = [Worker(module, peer, options) for peer in peers]
    try:
        facts = {worker.name: worker.wait_until_ready() for worker in workers}
        result = race(workers, rounds, steps)
    finally:
        for worker in workers:
            worker.close()
    return result, facts


def note(result: dict) -> str:
    """Returns in words how many rounds of a race counted."""
    text = f'{result["clean_rounds"]} of {result["rounds"]} rounds clean'
    if len(next(iter(result['workers'].values()))['seconds']) != result['clean_rounds']:
        text += '; TOO FEW, so all rounds are counted: run again on a quieter machine'
    return text


def machine() -> dict:
    """Returns the machine's name, cores, vector instructions and memory, as Linux states them."""
    fields = {}
    for line in Path('/proc/cpuinfo').read_text().splitlines():
        key, _, value = line.partition(':')
        fields.setdefault(key.strip(), value.strip())
    known = ('avx2', 'avx512f', 'avx512_bf16', 'amx_bf16', 'amx_tile')
    memory = int(Path('/proc/meminfo').read_text().split()[1]) / 2**20
    name = f'{fields["model name"]} (family {fields["cpu family"]}, model {fields["model"]})'
    flags = [flag for flag in known if flag in fields['flags'].split()]
    return {'cpu': name, 'cores': os.cpu_count(), 'vector_instructions': flags, 'memory_gib': round(memory, 1)}


def machine_line() -> str:
    """Returns `machine()` as one line to put above a table."""
    facts = machine()
    flags = ', '.join(facts['vector_instructions']) or 'no vector instructions known here'
    return f'{facts["cpu"]}, {facts["cores"]} cores, {flags}, {facts["memory_gib"]} GiB'


def _busy_seconds() -> float:
    """CPU seconds used by anything on this machine since it started; steal counts, idle and waiting for disk do not."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path('/proc/stat').read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf('SC_CLK_TCK')
