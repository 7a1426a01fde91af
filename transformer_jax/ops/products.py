"""Products of two arrays whose operands may be bf16 and whose sums are always fp32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def einsum(spec: str, a: jax.Array, b: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Contracts two arrays: operands in `a`'s dtype, sums in fp32, then one rounding to `dtype`.

    y = round(sum_k a_k round(b_k)); the gradients are computed alike, and returned in each operand's own dtype, so
    fp32 parameters get fp32 gradients. With fp32 operands it is `jnp.einsum`.

    Args:
      spec: an explicit two-operand einsum such as 'BTD,DNH->BTNH'. Each letter stands in at least two of its terms.
      a: activations; its dtype is the compute dtype.
      b: parameters or activations; rounded to the compute dtype.
      dtype: of the result (None: that of `a`).
    """
    if a.dtype == b.dtype == jnp.float32:
        # Also keeps forward-mode differentiation, which a custom VJP does not have.
        return jnp.einsum(spec, a, b).astype(dtype or a.dtype)
    return _low_precision_einsum(spec, jnp.dtype(dtype or a.dtype), a, b)


def _accumulate(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _low_precision_einsum(spec, dtype, a, b):
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


_low_precision_einsum.defvjp(_forward, _backward)
