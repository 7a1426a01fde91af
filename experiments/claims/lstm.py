"""A Transformer layer against an LSTM: time against length."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from experiments.claims.finding import Finding, verdict
from experiments.claims.timing import seconds
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.config import ModelConfig
from transformer_jax.models import build, init_params
from transformer_jax.training.flops import matrix_product_flops

LENGTHS = (32, 64, 128, 256, 512, 1024)
D = 128


def measure(figure: str) -> Finding:
    """Runs one sequence forward through an encoder layer (F = 2 D) and through an LSTM of the same width."""
    model = build(
        ModelConfig(
            kind='encoder',
            vocab_size=100,
            d_model=D,
            d_ff=2 * D,
            num_layers=1,
            num_heads=4,
            head='none',
            tie_embeddings='none',
            layer_stack='unrolled',
        )
    )
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    lstm = nn.RNN(nn.OptimizedLSTMCell(D))
    weights = jax.jit(lstm.init)(jax.random.key(0), np.zeros((1, 2, D), np.float32))

    def forward(params, words):
        return model.apply({'params': params}, words).hidden

    times, work = {'Transformer': [], 'LSTM': []}, {'Transformer': [], 'LSTM': []}
    for T in LENGTHS:
        for name, function, arguments in (
            ('Transformer', forward, (params, tokens(T))),
            ('LSTM', lstm.apply, (weights, states(T))),
        ):
            times[name].append(1000 * seconds(jax.jit(function), *arguments))
            work[name].append(matrix_product_flops(function, *arguments) / 1e6)
    panels = [
        Panel('length', what, [Line(name, LENGTHS, numbers) for name, numbers in values.items()], 'log')
        for what, values in (('milliseconds', times), ('MFLOPs', work))
    ]
    draw_panels('One sequence forward, D = 128', panels, figure)
    ratio = [slow / fast for slow, fast in zip(times['LSTM'], times['Transformer'], strict=True)]
    rate = {name: work[name][2] / times[name][2] for name in times}
    growth = times['Transformer'][-1] / times['Transformer'][0]
    steps = {'Transformer': _steps(forward, params, tokens(1024)), 'LSTM': _steps(lstm.apply, weights, states(1024))}
    return Finding(
        'An LSTM must step through the sequence; a Transformer handles all positions at once, in a time independent '
        'of n.',
        f'At 1,024 tokens the LSTM has {steps["LSTM"]:,} steps which wait for each other, the Transformer layer '
        f'{steps["Transformer"]}. What that gains depends on the machine: on 2 cores one sequence takes the LSTM '
        f'{ratio[0]:.1f} times as long at 32 tokens and {ratio[-1]:.2f} times at 1,024, since both do about as many '
        f'GFLOP/s ({rate["LSTM"]:.0f} and {rate["Transformer"]:.0f} at 128 tokens) and attention has more to do. The '
        f'time of the Transformer is not independent of n: it grows {growth:.0f} times from 32 to 1,024 tokens.',
        verdict(steps['Transformer'] <= 1 < steps['LSTM'], growth < 2),
    )


def tokens(T: int) -> np.ndarray:
    """Returns one sequence of T words."""
    return np.ones((1, T), np.int32)


def states(T: int) -> np.ndarray:
    """Returns one sequence of T vectors."""
    return np.ones((1, T, D), np.float32)


def _steps(function, *arguments) -> int:
    """Returns the iterations of the longest loop in function(*arguments), 0 if there is none."""

    def longest(jaxpr) -> int:
        own = [equation.params['length'] for equation in jaxpr.eqns if equation.primitive.name == 'scan']
        inner = [longest(sub) for equation in jaxpr.eqns for sub in jaxprs_in_params(equation.params)]
        return max([0, *own, *inner])

    return longest(jax.make_jaxpr(function)(*arguments).jaxpr)
