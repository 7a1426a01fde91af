"""Tokens per second against the answer's length, where the cache has to have room for much more.

Run from the repository root with nothing else running:
    python -m benchmarks.decoding_length --output=length.json
Greedy answers of exactly n tokens, by a program which has room for n tokens and by one which has room for --room; both
take turns, and the median round counts. A cache which is read at its full capacity makes the second one slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks import protocol
from transformer_jax import DecodeConfig, ModelConfig
from transformer_jax.decoding.generate import search
from transformer_jax.decoding.inputs import prepare
from transformer_jax.models import build, init_params
from transformer_jax.training.host_cpu import tune_host_cpu

# The decoder of transformer_base alone.
CONFIG = ModelConfig(
    kind='decoder', vocab_size=8000, d_model=512, d_ff=2048, num_layers=6, num_heads=8, position='rope', dropout=0.0
)


def main() -> None:
    """Measures every length and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', nargs='+', type=int, default=[64, 256, 1024])
    parser.add_argument('--room', type=int, default=1024, help='tokens for which the second program has room')
    parser.add_argument('--batch', type=int, default=4)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--output', type=Path, help='also write everything here, as JSON')
    arguments = parser.parse_args()
    tune_host_cpu()  # as the programs of experiments/ do
    print(protocol.machine_line())
    print(f'\n| tokens | room for as many, tokens/s | room for {arguments.room}, tokens/s | second / first |')
    print('|---' * 4 + '|')
    model = build(CONFIG)
    params = init_params(model, jax.random.key(0))
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (arguments.batch, 32))
    results = {}
    for length in arguments.lengths:
        seconds = _measure(model, params, prompt, length, sorted({length, arguments.room}), arguments.rounds)
        results[length] = seconds
        own, roomy = (
            arguments.batch * length / statistics.median(seconds[room]) for room in (length, arguments.room)
        )
        ratio = statistics.median(a / b for a, b in zip(seconds[length], seconds[arguments.room], strict=True))
        print(f'| {length} | {own:,.0f} | {roomy:,.0f} | {ratio:.2f} |', flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({'machine': protocol.machine(), 'seconds': results}, indent=1) + '\n')


def _measure(model, params, prompt, length: int, rooms: list[int], rounds: int) -> dict[int, list[float]]:
    """Returns the seconds of each round by room."""
    config = DecodeConfig(max_new_tokens=length, eos_ids=())
    inputs, static, _ = prepare(model.config, prompt, None, config, 0)

    def run(room):
        found, _ = search(params, inputs, model=model, config=static, capacity=room)
        assert int(found.lengths_BK.min()) == length
        return found

    seconds = {room: [] for room in rooms}
    for number in range(rounds + 1):
        for room in rooms:
            start = time.perf_counter()
            run(room)
            if number:  # the first time compiles
                seconds[room].append(time.perf_counter() - start)
    return seconds


if __name__ == '__main__':
    main()
