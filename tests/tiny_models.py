"""Tiny models for the tests: every parameter random, biases and norms too, and no initialiser compiled."""

import functools

import jax
import jax.extend
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.models import abstract_params, build, unroll_params

TINY = dict(
    vocab_size=23, d_model=16, d_ff=12, num_layers=2, num_heads=4, dropout=0.0, layer_stack='unrolled', max_positions=64
)  # fmt: skip


def tiny(**choices):
    return ModelConfig(**TINY | choices)


@functools.cache
def model_and_params(config, seed=0):
    """The model and parameters like trained ones: scales near their start, nothing exactly 0 or 1."""
    model = build(config)
    shapes, _ = abstract_params(model)
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = path[-1].key
        spread = {'scale': 0.2, 'bias': 0.2, 'kernel': 0.4, 'relative_bias': 1.0, 'embedding': 0.5}[name]
        centre = 1.0 if name == 'scale' and config.norm != 'rms_plus_one' else 0.0
        return (centre + spread * rng.normal(size=leaf.shape)).astype(leaf.dtype)

    return model, jax.tree_util.tree_map_with_path(fill, shapes)


def by_name(params, config):
    """The unrolled tree in numpy, which the oracles read."""
    return jax.tree.map(np.asarray, unroll_params(params, config))


def some_tokens(*shape, seed=0, vocabulary=TINY['vocab_size']):
    return np.random.default_rng(seed).integers(1, vocabulary, shape).astype(np.int32)


def equations(jaxpr):
    """Every equation of a jaxpr, also those inside loops, calls and custom rules."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def product_flops(function, *arguments):
    """Floating-point operations of all products of a function without loops."""
    total = 0
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        if equation.primitive.name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            left = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * int(np.prod([left[axis] for axis in contracted]))
    return total
