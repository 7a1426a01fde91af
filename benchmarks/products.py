"""How fast products are on this machine: the orders of operands among which `ops.products` chooses.

Run from the repository root with nothing else running:
    python -m benchmarks.products
Products of a decoding step: those of all matrices of transformer_base's decoder (104 MB, more than a cache holds) with
few rows, the matrix as a model has it, or column after column, or column after column and first (`ColumnMajor`).
Product of a gradient: that of a feed-forward matrix over 1,024 tokens, as JAX differentiates and as `einsum` does.
The orders take turns, and the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import protocol
from transformer_jax.ops.products import ColumnMajor, einsum

# (rows, columns), and how many there are in six layers: W_Q ... W_O of both attentions, without the source's keys.
MATRICES = [(512, 512)] * 36 + [(512, 2048), (2048, 512)] * 6 + [(512, 8000)]
TOKENS, WIDTH, INNER = 1024, 512, 2048


def main() -> None:
    """Measures both and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', nargs='+', type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument('--rounds', type=int, default=7)
    arguments = parser.parse_args()
    print(protocol.machine_line())
    print('\n| rows | by rows, ms | by columns, ms | by columns and first, ms | last / first |\n' + '|---' * 5 + '|')
    for rows in arguments.rows:
        first, second, third = _fastest(_steps(rows), arguments.rounds)
        print(
            f'| {rows} | {1e3 * first:.1f} | {1e3 * second:.1f} | {1e3 * third:.1f} | {third / first:.2f} |', flush=True
        )
    plain, ours = _fastest(_gradients(), arguments.rounds)
    speeds = [2 * TOKENS * WIDTH * INNER / seconds / 1e9 for seconds in (plain, ours)]
    print(f'\nGradient of a {WIDTH} x {INNER} matrix over {TOKENS} tokens, GFLOP/s:', end=' ')
    print(f'{speeds[0]:.0f} as JAX differentiates, {speeds[1]:.0f} as einsum does; {ours / plain:.2f} of the time')


def _steps(rows: int) -> list[Callable[[], jax.Array]]:
    """Returns ways to multiply by every matrix."""
    rng = np.random.default_rng(0)
    matrices = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in MATRICES]
    by_columns = [ColumnMajor.of(matrix, 1) for matrix in matrices]
    x = {width: jnp.asarray(rng.normal(size=(rows, width)), jnp.float32) for width in (512, 2048)}

    def second(x, kept):
        return jnp.einsum('my,zy->mz', x, kept.columns_ZY)

    def every(product):
        @jax.jit
        def run(x, matrices):
            # Each product waits for the one before it, as in a step.
            last = jnp.float32(0)
            for (width, _), matrix in zip(MATRICES, matrices, strict=True):
                last = 1e-30 * product(x[width] + last, matrix)[0, 0]
            return last

        return run

    ways = [(lambda x, matrix: x @ matrix, matrices), (second, by_columns)]
    ways.append((lambda x, kept: einsum('my,yz->mz', x, kept), by_columns))
    return [functools.partial(every(product), x, given) for product, given in ways]


def _gradients() -> list[Callable[[], jax.Array]]:
    """Returns ways to differentiate a product by its matrix."""
    rng = np.random.default_rng(0)
    shapes = (1, TOKENS, WIDTH), (WIDTH, INNER), (1, TOKENS, INNER)
    x, w, slope = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def by_matrix(product):
        run = jax.jit(lambda x, w, slope: jax.vjp(lambda w: product('aby,yz->abz', x, w), w)[1](slope)[0])
        return functools.partial(run, x, w, slope)

    return [by_matrix(jnp.einsum), by_matrix(einsum)]


def _fastest(ways: list[Callable[[], jax.Array]], rounds: int) -> list[float]:
    seconds = [[] for _ in ways]
    for _ in range(rounds + 1):
        for run, own in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            own.append(time.perf_counter() - start)
    return [min(own[1:]) for own in seconds]  # without the first, which compiles


if __name__ == '__main__':
    main()
