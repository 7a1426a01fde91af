"""Scaled dot-product attention: both programs against numpy, and against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from transformer_jax.errors import UserError
from transformer_jax.ops import attention as ops
from transformer_jax.ops.attention import Dropout
from transformer_jax.ops.masks import Mask

RNG = np.random.default_rng(0)
# One compilation costs less than two dozen operations each compiled alone.
attention = jax.jit(ops.attention, static_argnames=('scale', 'softcap', 'backend', 'return_weights'))


def operands(B=2, T=5, S=7, N=4, K=2, H=6, V=3, dtype=np.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V)
    return tuple(jnp.asarray(RNG.normal(size=shape).astype(dtype)) for shape in shapes)


def test_worked_example_of_the_seeds():
    """One query of width 2 on three keys: 0.43932, 0.45852 exactly; the text rounds to 0.439, 0.459."""
    query = jnp.array([0.6, 0.3]).reshape(1, 1, 1, 2)
    key = jnp.array([[0.8, 0.2], [0.3, 0.9], [0.5, 0.4]]).reshape(1, 3, 1, 2)
    value = jnp.array([[0.7, 0.1], [0.2, 0.8], [0.4, 0.5]]).reshape(1, 3, 1, 2)
    out, weights = attention(query, key, value, Mask(), scale=2**-0.5, return_weights=True)
    np.testing.assert_allclose(np.asarray(out).ravel(), [0.43932, 0.45852], atol=5e-6)
    np.testing.assert_allclose(np.asarray(weights).ravel(), [0.3505, 0.3289, 0.3220], atol=1.5e-3)
    expected, _ = oracles.attend(query[0], key[0], value[0], np.ones((1, 3), bool), 2**-0.5)
    np.testing.assert_allclose(np.asarray(out)[0], expected, atol=1e-6)


@pytest.mark.parametrize('K', [4, 2, 1])
def test_attention_is_the_papers_equation_head_by_head(K):
    """Consecutive query heads share a key head: 0, 0, 1, 1 and never 0, 1, 0, 1."""
    query, key, value = operands(K=K)
    bias = RNG.normal(size=(1, 4, 5, 7)).astype(np.float32)
    choices = dict(scale=0.7, bias_BNTS=jnp.asarray(bias), softcap=1.5, return_weights=True)
    out, weights = attention(query, key, value, Mask(causal=True, window=4), **choices)
    for row in range(2):
        visible = oracles.triangle(5, 7, window=4)
        expected = oracles.attend(query[row], key[row], value[row], visible, 0.7, bias[0], 1.5)
        np.testing.assert_allclose(np.asarray(out[row]), expected[0], atol=1e-6)
        np.testing.assert_allclose(np.asarray(weights[row]), expected[1], atol=1e-6)


def test_shared_key_heads_equal_a_full_model_with_the_heads_copied_out():
    query, key, value = operands(N=8, K=2)
    shared, _ = attention(query, key, value, Mask(causal=True), scale=0.4)
    copied = [jnp.stack([x[:, :, head] for head in (0, 0, 0, 0, 1, 1, 1, 1)], axis=2) for x in (key, value)]
    full, _ = attention(query, *copied, Mask(causal=True), scale=0.4)
    np.testing.assert_allclose(np.asarray(shared), np.asarray(full), atol=1e-6)


@pytest.mark.parametrize('dtype, backend', [
    ('float32', 'reference'), ('bfloat16', 'reference'), ('float16', 'reference'), ('bfloat16', 'blockwise'),
])  # fmt: skip
def test_hidden_keys_weigh_nothing_and_rows_without_keys_give_zeros(dtype, backend):
    """Rows 0-2 of 5 see padding only, and so does the whole second sentence: zeros, and finite gradients of 0."""
    query, key, value = (x.astype(dtype) for x in operands(T=5, S=5))
    valid = jnp.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], bool)
    mask = Mask(causal=True, key_valid_BS=valid)

    def total(query, key, value, scores_alike=False):
        out, _ = ops.attention(query, key, value, mask, scale=0.0 if scores_alike else 1.0, backend=backend)
        return (out.astype(jnp.float32) ** 2).sum(), out

    gradients, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(query, key, value)
    out = np.asarray(out, np.float32)
    assert (out[0, :3] == 0).all() and (out[1] == 0).all() and (out[0, 3:] != 0).any()
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    for gradient in gradients[1:]:
        assert (np.asarray(gradient, np.float32)[0, :3] == 0).all()
    even = jax.jit(functools.partial(total, scores_alike=True))(query, key, value)[1]
    even = np.asarray(even, np.float32)
    values = np.asarray(value, np.float32)[0].repeat(2, axis=1)
    tolerance = 1e-6 if dtype == 'float32' else 1e-2
    np.testing.assert_allclose(even[0, 3], values[3], atol=tolerance)
    np.testing.assert_allclose(even[0, 4], (values[3] + values[4]) / 2, atol=tolerance)


def test_half_precision_weights_are_those_of_fp32():
    """Scores 3, 1, 2 with the middle key hidden: 0.7311, 0, 0.2689."""
    query = jnp.ones((1, 1, 1, 1))
    key = jnp.array([3.0, 1.0, 2.0]).reshape(1, 3, 1, 1)
    mask = Mask(key_valid_BS=jnp.array([[True, False, True]]))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        operands = query.astype(dtype), key.astype(dtype), key.astype(dtype)
        _, weights = attention(*operands, mask, scale=1.0, return_weights=True)
        np.testing.assert_allclose(np.asarray(weights).ravel(), [0.731059, 0, 0.268941], atol=1e-6)
        assert np.asarray(weights).ravel()[1] == 0


SEGMENTS = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [90, 110, 70, 30], axis=1))
MASKS = {
    'full': Mask(),
    'causal': Mask(causal=True),
    'window_and_padding': Mask(causal=True, window=50, key_valid_BS=jnp.arange(300)[None] >= jnp.array([[0], [140]])),
    'segments': Mask(causal=True, query_segments_BT=SEGMENTS, key_segments_BS=SEGMENTS),
    'prefix': Mask(causal=True, prefix_B=jnp.array([10, 200])),
}


def both_programs(mask, operands, **options):
    """(out, gradients) of either program, and their compiled texts."""
    results, texts = [], []
    weight = jnp.asarray(np.random.default_rng(5).normal(size=(*operands[0].shape[:3], operands[2].shape[-1])))

    for backend in ('reference', 'blockwise'):

        def total(operands, bias, backend=backend):
            out, _ = ops.attention(*operands, mask, scale=0.4, bias_BNTS=bias, backend=backend, **options)
            return (out * weight).sum(), out

        bias = options.pop('bias', None)
        step = jax.jit(jax.grad(total, (0,) if bias is None else (0, 1), has_aux=True)).lower(operands, bias).compile()
        results.append(step(operands, bias))
        texts.append(step.as_text())
        if bias is not None:
            options['bias'] = bias
    return results, texts


@pytest.mark.parametrize('name', MASKS)
def test_blockwise_equals_reference_forward_and_backward(name):
    """300 queries are two blocks of 128 and a part of one; shared key heads, a bias and a softcap among the masks."""
    options = {}
    if name == 'causal':
        options = dict(softcap=1.2, bias=jnp.asarray(RNG.normal(size=(1, 4, 300, 300)).astype(np.float32)))
    if name == 'full':
        options = dict(bias=jnp.asarray(RNG.normal(size=(2, 4, 1, 300)).astype(np.float32)))
    (reference, blockwise), texts = both_programs(MASKS[name], operands(T=300, S=300, H=4), **options)
    assert 'while' in texts[1] and 'while' not in texts[0]
    for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(blockwise), strict=True):
        assert np.abs(np.asarray(a)).max() > 0
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5)


def test_blockwise_lines_up_fewer_queries_than_keys_and_more():
    for T, S in ((140, 200), (200, 140)):
        query, key, value = operands(B=1, T=T, S=S, K=1)
        expected, _ = oracles.attend(query[0], key[0], value[0], oracles.triangle(T, S), 1.0)
        out, _ = attention(query, key, value, Mask(causal=True), scale=1.0, backend='blockwise')
        np.testing.assert_allclose(np.asarray(out)[0], expected, atol=1e-5)


def test_memory_of_blockwise_grows_with_the_length_and_that_of_reference_with_its_square():
    def temporary_bytes(T, backend):
        def total(query, key, value):
            return ops.attention(query, key, value, Mask(causal=True), scale=1.0, backend=backend)[0].sum()

        shape = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    reference, blockwise = ([temporary_bytes(T, kind) for T in (1024, 2048)] for kind in ('reference', 'blockwise'))
    assert reference[1] > 3 * reference[0]
    assert blockwise[1] < 2.2 * blockwise[0]
    assert blockwise[1] < reference[1] / 6


def test_dropout_of_weights_differs_from_block_to_block_and_repeats_in_the_backward_pass():
    """With values of ones an output is its row's share of kept weights, and its gradient by a value is the weights'."""
    query, key = jnp.zeros((1, 256, 1, 2)), jnp.zeros((1, 256, 1, 2))
    drop = Dropout(0.5, jax.random.key(3))

    def total(value, backend):
        out, _ = ops.attention(query, key, value, Mask(), scale=1.0, drop=drop, backend=backend)
        return out.sum(), out

    for backend in ('reference', 'blockwise'):
        both = jax.jit(jax.grad(functools.partial(total, backend=backend), has_aux=True))(jnp.eye(256)[None, :, None])
        by_value, kept = np.asarray(both[0])[0, :, 0, 0], np.asarray(both[1])[0, :, 0] > 0
        assert 0.45 < kept.mean() < 0.55
        assert not np.array_equal(kept[:128], kept[128:])
        np.testing.assert_allclose(by_value, kept.sum(0) * 2 / 256, rtol=1e-5)


def test_scaled_scores_have_a_variance_near_one():
    """Components of variance 1: var(q k) = d_k, so that 1 / sqrt(d_k) brings it back to 1, whatever d_k is."""
    for d_k in (16, 64, 256):
        query, key = (jnp.asarray(RNG.normal(size=(1, 200, 1, d_k)).astype(np.float32)) for _ in range(2))
        value = jnp.zeros((1, 200, 1, 1))
        _, weights = attention(query, key, value, Mask(), scale=d_k**-0.5, return_weights=True)
        scores = np.log(np.asarray(weights, np.float64))
        # The softmax takes a constant from each row, and with it the variance between rows.
        assert abs((scores - scores.mean(-1, keepdims=True)).var() - 1) < 0.15


def test_an_unknown_program_is_refused_by_name():
    with pytest.raises(UserError, match="'blockwis' is unknown; did you mean 'blockwise'"):
        ops.attention(*operands(), Mask(), scale=1.0, backend='blockwis')
