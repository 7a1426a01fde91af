"""Products of two arrays whose operands may be bf16 and whose sums are always fp32."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from transformer_jax.ops.quantized import QuantizedArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ColumnMajor:
    """A matrix which lies in memory column after column, and stands where a matrix stands in the tree of parameters.

    Its product with few rows is y^T = W^T x^T: as the first operand a CPU reads the matrix once, from one end to the
    other, where as the second it makes a packed copy of it (`python -m benchmarks.products` measures both).

    Attributes:
      columns_ZY: the matrix's columns, Z of them with Y numbers each; of a table of words its rows.
    """

    columns_ZY: jax.Array

    @classmethod
    def of(cls, array: jax.Array, inputs: int) -> ColumnMajor:
        """Returns the matrix whose rows are the first `inputs` axes of the array, and whose columns are the others."""
        # Not in the array's own shape, though Flax would take it for the parameter then: XLA on CPU would join the
        # transpose with the reshape, and take four times as long.
        return cls(array.reshape(math.prod(array.shape[:inputs]), -1).T)

    def take_rows(self, index: jax.Array) -> jax.Array:
        """Returns rows of a table, whose rows are the columns of its matrix; NaN for an index outside of it."""
        return take_rows(self.columns_ZY, index)

    def product(self, a: jax.Array) -> jax.Array:
        """Returns `a` W in fp32, for any number of axes in front of the last one."""
        x_MY = a.reshape(-1, a.shape[-1])
        columns_ZY = self.columns_ZY.astype(a.dtype)
        y_ZM = jnp.einsum('ZY,MY->ZM', columns_ZY, x_MY, preferred_element_type=jnp.float32)
        # Else XLA would exchange the operands where that saves the transpose.
        return jax.lax.optimization_barrier(y_ZM).T.reshape(*a.shape[:-1], -1)


def take_rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows of a table, NaN for an index outside of it: -1 is no row, let alone the last one."""
    # As an array of JAX, for parameters may be restored as numpy's.
    return jnp.asarray(table).at[index].get(mode='fill', fill_value=jnp.nan, wrap_negative_indices=False)


Matrix = jax.Array | QuantizedArray | ColumnMajor


def einsum(spec: str, a: jax.Array, b: Matrix, dtype: DTypeLike | None = None) -> jax.Array:
    """Contracts two arrays: operands in `a`'s dtype, sums in fp32, then one rounding to `dtype`.

    y = round(sum_k a_k round(b_k)); the gradients are computed alike, and returned in each operand's own dtype, so
    fp32 parameters get fp32 gradients. It has derivatives of any order in reverse mode (a Hessian times v is the
    gradient of v's product with the gradient), and none in forward mode.

    Args:
      spec: an explicit two-operand einsum such as 'BTD,DNH->BTNH'. Each letter stands in at least two of its terms.
      a: activations; its dtype is the compute dtype.
      b: parameters or activations; rounded to the compute dtype. Other kinds of matrix have products of their own, a
        `ColumnMajor` that over the last axis of `a` whatever the spec's letters.
      dtype: of the result (None: that of `a`).
    """
    if isinstance(b, ColumnMajor):
        return b.product(a).astype(dtype or a.dtype)
    if isinstance(b, QuantizedArray):
        return b.contract(spec, a).astype(dtype or a.dtype)
    return _einsum(spec, jnp.dtype(dtype or a.dtype), a, b)


def _accumulate(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    terms, result = spec.split('->')
    left, right = terms.split(',')
    shared = ''.join(axis for axis in left if axis in right and axis in result)
    own = [[axis for axis in term if axis in result and axis not in shared] for term in (left, right)]
    # XLA on CPU has its fast products only for a first operand which is summed along its last axes (`python -m
    # benchmarks.products`; of bf16 over a batch it has no others, and says so only when it runs). So the first operand
    # is that whose axes come first in the result, else XLA exchanges the two, and it is put in order beforehand, where
    # its transpose cannot be folded into the product.
    exchanged = all(own) and result.index(own[0][0]) > result.index(own[1][0])
    if exchanged:
        left, right, own = right, left, own[::-1]
    first = shared + ''.join(own[0]) + ''.join(axis for axis in left if axis not in result)
    product = shared + ''.join(own[0] + own[1])

    def plain(a, b):
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    def ordered(a, b):
        a, b = (b, a) if exchanged else (a, b)
        if first != left:
            a = jax.lax.optimization_barrier(jnp.transpose(a, [left.index(axis) for axis in first]))
        y = jnp.einsum(f'{first},{right}->{product}', a, b, preferred_element_type=jnp.float32)
        return jnp.transpose(y, [product.index(axis) for axis in result])

    if not exchanged and (first, product) == (left, result):
        return plain(a, b)
    return jax.lax.platform_dependent(a, b, cpu=ordered, default=plain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(spec, dtype, a, b):
    return _accumulate(spec, a, b.astype(a.dtype)).astype(dtype)


def _forward(spec, dtype, a, b):
    # Differentiated by JAX, the transposed products would take an fp32 cotangent and leave the bf16 units.
    rounded = b.astype(a.dtype)
    return _accumulate(spec, a, rounded).astype(dtype), (a, rounded, jnp.zeros((), b.dtype))


def _backward(spec, dtype, residuals, cotangent):
    a, b, like_b = residuals
    terms, result = spec.split('->')
    left, right = terms.split(',')
    cotangent = cotangent.astype(a.dtype)
    grad_a = _accumulate(f'{result},{right}->{left}', cotangent, b).astype(a.dtype)
    grad_b = _accumulate(f'{left},{result}->{right}', a, cotangent).astype(like_b.dtype)
    return grad_a, grad_b


_einsum.defvjp(_forward, _backward)
