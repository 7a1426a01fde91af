"""Floating-point operations of a model, counted from its own program rather than from a formula a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

# Backward needs two products for each forward one: by the weights and by the inputs.
TRAINING_FACTOR = 3


def matrix_product_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """Returns the FLOPs of all matrix products in function(*arguments), 2 for each multiply-add.

    Arguments may be `jax.ShapeDtypeStruct`s; nothing is computed. A scan's body counts once a step, of several
    branches the largest counts, and the body of an unbounded loop counts once. Masked products count, as the machine
    computes them; look-ups, norms, softmax and other elementwise work do not.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def training_flops(model: Any, params: Any, inputs: dict[str, Any]) -> int:
    """Returns the model FLOPs of one training step: forward once and backward twice, without recomputation."""
    forward = matrix_product_flops(lambda p, x: model.apply({'params': p}, **x).logits, params, inputs)
    return TRAINING_FACTOR * forward


def _count(jaxpr: Any) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == 'dot_general':
        (contracted, _), _ = params['dimension_numbers']
        depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * depth * math.prod(equation.outvars[0].aval.shape)
    if name in ('ragged_dot', 'ragged_dot_general'):
        # Every row meets the matrix of its one group.
        rows, (_, depth, columns) = equation.invars[0].aval.shape[0], equation.invars[1].aval.shape
        return 2 * rows * depth * columns
    inner = [_count(sub) for sub in jaxprs_in_params(params)]
    if name == 'scan':
        return params['length'] * sum(inner)
    return max(inner, default=0) if name == 'cond' else sum(inner)
