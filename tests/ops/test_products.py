"""Products: fp32 sums, one rounding, and gradients in their operands' own types."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.ops.products import ColumnMajor, einsum

RNG = np.random.default_rng(0)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(np.float64)


def assert_one_rounding(ours, exact, magnitude):
    """A bf16 result differs from the exact one by half a unit in its last place, beside fp32's own sums."""
    assert ours.dtype == jnp.bfloat16
    gap = np.abs(np.asarray(ours).astype(np.float64) - exact)
    assert (gap <= 2.0**-8 * np.abs(exact) + 1e-6 * magnitude).all()


def test_bf16_products_have_fp32_sums_and_one_rounding():
    a, b = RNG.normal(size=(3, 4000)), RNG.normal(size=(4000, 5))
    exact, magnitude = rounded(a) @ rounded(b), np.abs(rounded(a)) @ np.abs(rounded(b))
    low = jnp.asarray(a, jnp.bfloat16)
    assert_one_rounding(einsum('ak,kb->ab', low, jnp.asarray(b, jnp.float32)), exact, magnitude)
    wide = einsum('ak,kb->ab', low, jnp.asarray(b, jnp.float32), jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(wide), exact, atol=1e-6 * magnitude.max())
    # Sums in bf16 would lose most of 4000 terms: 1 + 1 + ... stops at 256.
    ones = jnp.ones((1, 4000), jnp.bfloat16)
    assert float(einsum('ak,kb->ab', ones, jnp.ones((4000, 1)), jnp.float32)[0, 0]) == 4000


def test_gradients_of_bf16_products_have_fp32_sums_and_their_operands_types():
    a, b, c = RNG.normal(size=(4000, 3)), RNG.normal(size=(3, 5)), RNG.normal(size=(4000, 5))
    low, weight = jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.float32)

    def total(low, weight):
        return (einsum('ka,ab->kb', low, weight, jnp.float32) * jnp.asarray(c, jnp.float32)).sum()

    by_a, by_b = jax.grad(total, (0, 1))(low, weight)
    assert by_b.dtype == jnp.float32
    # Without a rounding to bf16 at the end: the gradient of an fp32 parameter is an fp32 sum.
    exact = rounded(a).T @ rounded(c)
    np.testing.assert_allclose(np.asarray(by_b), exact, atol=1e-6 * (np.abs(rounded(a)).T @ np.abs(c)).max())
    assert_one_rounding(by_a, rounded(c) @ rounded(b).T, np.abs(rounded(c)) @ np.abs(rounded(b)).T)


def test_fp32_products_are_numpys():
    a, b = RNG.normal(size=(2, 3, 4)).astype(np.float32), RNG.normal(size=(4, 2, 5)).astype(np.float32)
    ours = einsum('uva,abc->uvbc', jnp.asarray(a), jnp.asarray(b))
    np.testing.assert_allclose(np.asarray(ours), np.einsum('uva,abc->uvbc', a.astype(np.float64), b), atol=1e-6)


@pytest.mark.parametrize('spec', ['BKGTS,BKSV->BTKGV', 'BTKGV,BKSV->BKGTS', 'BKGTS,BSKV->BTKGV', 'ka,kb->ba'])
def test_any_order_of_axes_has_a_bf16_product_and_gradients(spec):
    sizes = {'B': 8, 'K': 4, 'G': 2, 'T': 2, 'S': 256, 'V': 48, 'k': 70, 'a': 3, 'b': 5}
    left, right = spec.split('->')[0].split(',')
    a, b = (jnp.asarray(RNG.normal(size=[sizes[axis] for axis in term]), jnp.bfloat16) for term in (left, right))
    c = RNG.normal(size=[sizes[axis] for axis in spec.split('->')[1]])

    @jax.jit
    def run(a, b):
        return jax.value_and_grad(lambda a, b: (einsum(spec, a, b, jnp.float32) * c).sum(), (0, 1))(a, b)

    value, (by_a, by_b) = run(a, b)
    result = spec.split('->')[1]
    exact = [
        (np.einsum(spec, rounded(a), rounded(b), optimize=True) * c).sum(),
        np.einsum(f'{result},{right}->{left}', rounded(c), rounded(b), optimize=True),
        np.einsum(f'{left},{result}->{right}', rounded(a), rounded(c), optimize=True),
    ]
    np.testing.assert_allclose(float(value), exact[0], rtol=1e-4, atol=1e-2)
    assert_one_rounding(by_a, exact[1], 1 + np.abs(exact[1]).max())
    assert_one_rounding(by_b, exact[2], 1 + np.abs(exact[2]).max())


def test_gradients_of_fp32_products_are_numpys_and_so_is_a_hessian_times_a_vector():
    """With y = sum(C * (A B)^2) the Hessian in A times V is 2 (C * (V B)) B^T."""
    shapes = dict(a=(3, 2, 7), b=(7, 5), c=(3, 2, 5), v=(3, 2, 7))
    exact = {name: RNG.normal(size=shape) for name, shape in shapes.items()}
    a, b, c, v = (jnp.asarray(x, jnp.float32) for x in exact.values())

    def total(a, b):
        return (c * einsum('uva,ab->uvb', a, b) ** 2).sum()

    by_a, by_b = jax.jit(jax.grad(total, (0, 1)))(a, b)
    slope = 2 * exact['c'] * (exact['a'] @ exact['b'])
    np.testing.assert_allclose(by_a, slope @ exact['b'].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_b, np.tensordot(exact['a'], slope, ([0, 1], [0, 1])), rtol=1e-5, atol=1e-5)
    product = jax.jit(jax.grad(lambda a: jnp.vdot(jax.grad(total)(a, b), v)))(a)
    wanted = 2 * (exact['c'] * (exact['v'] @ exact['b'])) @ exact['b'].T
    np.testing.assert_allclose(product, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='says how XLA compiles for a CPU')
def test_every_product_of_a_gradient_sums_over_the_last_axis_of_its_first_operand():
    """Others are not among the fast products of XLA on CPU; differentiated by JAX, that of the weights is none."""

    def first_sums(product):
        def total(x, w):
            return jnp.tanh(product('uva,ab->uvb', x, w)).sum()

        text = jax.jit(jax.grad(total, (0, 1))).lower(jnp.ones((4, 16, 32)), jnp.ones((32, 48))).compile().as_text()
        return re.findall(r' dot\(.*lhs_contracting_dims=\{([\d,]*)\}', text)

    assert first_sums(einsum) == ['1'] * 3
    assert sorted(first_sums(jnp.einsum)) == ['0', '1', '1']


@pytest.mark.parametrize('shape, inputs', [((6, 5), 1), ((6, 2, 4), 1), ((2, 3, 5), 2)])
def test_a_matrix_kept_column_after_column_gives_the_product_of_its_rows(shape, inputs):
    rng = np.random.default_rng(0)
    kernel, x = rng.normal(size=shape).astype('float32'), rng.normal(size=(3, 1, 6)).astype('float32')
    kept = ColumnMajor.of(jnp.asarray(kernel), inputs)
    matrix = kernel.reshape(6, -1)
    np.testing.assert_array_equal(kept.columns_ZY, matrix.T)
    np.testing.assert_allclose(einsum('aby,yz->abz', x, kept), x @ matrix, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='says how XLA compiles for a CPU')
@pytest.mark.parametrize('spec, shape', [('my,yz->mz', (4, 32)), ('aby,yz->abz', (2, 2, 32))])
def test_a_matrix_kept_column_after_column_is_the_first_operand_of_the_compiled_product(spec, shape):
    """48 columns and 4 rows: the product has the matrix's columns first, and XLA does not exchange the two."""
    kept = ColumnMajor(jnp.ones((48, 32)))
    text = jax.jit(lambda x, kept: einsum(spec, x, kept)).lower(jnp.ones(shape), kept).compile().as_text()
    assert re.findall(r'= f32\[([\d,]*)\]\S* dot\(', text) == ['48,4']


def test_a_table_is_its_output_matrix_kept_column_after_column():
    table, x = RNG.normal(size=(7, 4)).astype('float32'), RNG.normal(size=(3, 1, 4)).astype('float32')
    kept = ColumnMajor(jnp.asarray(table))
    np.testing.assert_allclose(einsum('BTD,VD->BTV', x, kept), x @ table.T, rtol=1e-5, atol=1e-6)
    rows = np.asarray(kept.take_rows(jnp.array([6, -1, 0, 7])))
    np.testing.assert_array_equal(rows[[0, 2]], table[[6, 0]])
    assert np.isnan(rows[[1, 3]]).all()
