"""Kernels of the platforms against the reference, over what each declares to support; the rest is refused in words."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import config
from transformer_jax.analysis import hlo
from transformer_jax.errors import UserError
from transformer_jax.ops import attention as ops
from transformer_jax.ops import attention_cudnn
from transformer_jax.ops.attention_inputs import Dropout, Inputs
from transformer_jax.ops.masks import Mask
from transformer_jax.sharding import MeshConfig, batch_sharding, make_mesh, tracing_on

RNG = np.random.default_rng(0)
T = 384  # three blocks of 128
SEGMENTS = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [90, 170, 70, 54], axis=1))
VALID = jnp.arange(T)[None] >= jnp.array([[0], [200]])
MASKS = {
    'full': Mask(),
    'causal': Mask(causal=True),
    'window': Mask(causal=True, window=50),
    'window_both_ways': Mask(window=50),
    'padding': Mask(causal=True, key_valid_BS=VALID),
    'segments': Mask(causal=True, query_segments_BT=SEGMENTS, key_segments_BS=SEGMENTS, key_valid_BS=SEGMENTS > 0),
}


def make_inputs(mask='causal', N=2, K=1, H=8, V=8, dtype=jnp.float32, queries=T, keys=T, **options):
    shapes = (2, queries, N, H), (2, keys, K, H), (2, keys, K, V)
    operands = (jnp.asarray(RNG.normal(size=shape), dtype) for shape in shapes)
    return Inputs(*operands, MASKS[mask] if isinstance(mask, str) else mask, scale=0.5, **options)


def out_and_gradients(inputs, backend, mesh=None):
    """Returns (out, gradient by query, key and value) of a weighted sum of the output, and the compiled text."""

    def total(operands):
        with tracing_on(mesh):
            out, _ = ops.attention(
                *operands, inputs.mask, scale=inputs.scale, bias_BNTS=inputs.bias_BNTS, softcap=inputs.softcap,
                drop=inputs.drop, backend=backend,
            )  # fmt: skip
        weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out.astype(jnp.float32) * weight).sum(), out

    def program(operands):
        gradients, out = jax.grad(total, has_aux=True)(operands)
        return out, *gradients

    operands = inputs[:3] if mesh is None else jax.device_put(inputs[:3], batch_sharding(mesh, 1))
    compiled = jax.jit(program).lower(operands).compile()
    return compiled(operands), compiled.as_text()


def assert_equal(ours, reference, atol=2e-5):
    for a, b in zip(ours, reference, strict=True):
        assert np.abs(np.asarray(b, np.float32)).max() > 0.1
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol, rtol=atol)


@pytest.mark.parametrize('mask, options', [
    ('full', {'N': 1, 'V': 16}), ('causal', {'softcap': 1.5, 'queries': 256}), ('window', {}),
    ('window_both_ways', {'N': 1}), ('padding', {'N': 1}), ('segments', {'N': 4, 'K': 2}),
])  # fmt: skip
def test_splash_kernels_interpreted_equal_the_reference_forward_and_backward(mask, options):
    """Both are fp32 here: what differs is the order of sums of at most 384 terms."""
    inputs = make_inputs(mask, **options)
    (kernel, _), (reference, _) = (out_and_gradients(inputs, backend) for backend in ('splash', 'reference'))
    assert_equal(kernel, reference)
    if mask in ('padding', 'segments'):
        blind = np.asarray(~inputs.mask.visible(T, T).any(-1))
        assert blind.any() and (np.asarray(kernel[0])[blind] == 0).all()


@pytest.mark.parametrize('causal', [True, False])
def test_splash_on_a_mesh_of_rows_heads_and_positions_equals_the_reference_and_moves_no_queries(causal):
    segments = SEGMENTS[:, :256]  # 128 positions on each of two devices
    mask = Mask(causal=causal, query_segments_BT=segments, key_segments_BS=segments)
    inputs = make_inputs(mask, N=4, K=2, queries=256, keys=256)
    mesh = make_mesh(MeshConfig(data=2, sequence=2, tensor=2))
    (kernel, text), (reference, _) = out_and_gradients(inputs, 'splash', mesh), out_and_gradients(inputs, 'reference')
    assert_equal(kernel, reference)
    # Each device's queries are its own row, half the positions and half the heads.
    assert 'f32[1,2,128,8]' in text


def test_blockwise_on_a_mesh_of_rows_heads_and_positions_equals_the_reference_and_takes_blocks_of_its_own_queries():
    """With dropout, which hashes numbers of weights, a bias of rows, and segments which end within blocks."""
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [190, 170, 70, 82], axis=1))
    mask = Mask(causal=True, window=300, query_segments_BT=segments, key_segments_BS=segments)
    bias = jnp.asarray(RNG.normal(size=(1, 4, 512, 512)).astype(np.float32))
    options = dict(bias_BNTS=bias, drop=Dropout(0.3, jax.random.key(3)), softcap=2.0)
    inputs = make_inputs(mask, N=4, K=2, queries=512, keys=512, **options)
    mesh = make_mesh(MeshConfig(data=2, sequence=2, tensor=2))
    (blocks, text), (reference, whole) = (
        out_and_gradients(inputs, backend, on) for backend, on in (('blockwise', mesh), ('reference', None))
    )
    assert_equal(blocks, reference)
    # Scores of one row, one part of the positions, one key head with its two queries, 128 queries and all keys.
    assert 'f32[1,1,1,2,128,512]' in text and 'f32[2,2,2,512,512]' in whole
    # No query moves: what is sent are the gradients of a device's keys and values, once, after all blocks.
    (sent,) = hlo.costs(text).collectives
    assert (sent.kind, sent.group, sent.runs, sent.bytes) == ('all-reduce', 2, 1, 2 * 512 * 8 * 4)


def test_cudnn_is_asked_for_what_the_reference_computes(monkeypatch):
    """cuDNN itself needs a GPU; JAX's own XLA program stands in for it, so that masks, bias and scale are compared."""
    program = jax.nn.dot_product_attention

    def stand_in(*operands, implementation, **options):
        assert implementation == 'cudnn'
        return program(*operands, implementation='xla', **options)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', stand_in)
    bias = jnp.asarray(RNG.normal(size=(1, 4, 1, T)).astype(np.float32))
    for mask, options in (('causal', {}), ('segments', {}), ('padding', {'bias_BNTS': bias}), ('window', {})):
        inputs = make_inputs(mask, N=4, K=2, dtype=jnp.bfloat16, **options)
        out = jax.jit(lambda operands, inputs=inputs: attention_cudnn.attend(Inputs(*operands, *inputs[3:]), 'gpu'))
        (reference, *_), _ = out_and_gradients(inputs, 'reference')
        # bf16 has 8 bits, and weights of values up to 4 are rounded to it: a few of 4 / 256.
        assert_equal([out(inputs[:3])], [reference], atol=4e-2)


def test_cudnn_is_what_a_gpu_program_calls(monkeypatch):
    fused = jax._src.cudnn.fused_attention_stablehlo
    monkeypatch.setattr(fused, 'check_cudnn_version', lambda: 91000)
    monkeypatch.setattr(fused, 'check_compute_capability', lambda capability: True)
    inputs = make_inputs(N=4, K=2, dtype=jnp.bfloat16)
    jitted = jax.jit(lambda operands: attention_cudnn.attend(Inputs(*operands, *inputs[3:]), 'gpu'))
    assert '__cudnn$fmha' in jitted.trace(inputs[:3]).lower(lowering_platforms=('cuda',)).as_text()


BIAS = jnp.zeros((1, 2, T, T))
LACKS = [
    ('splash', {'bias_BNTS': BIAS}, 'a bias on the scores'),
    ('splash', {'drop': Dropout(0.1, jax.random.key)}, 'dropout of attention weights'),
    ('splash', {'mask': Mask(causal=True, prefix_B=jnp.ones(2))}, 'a prefix'),
    ('splash', {'mask': Mask(causal=True, offset=jnp.zeros(()))}, 'a cache'),
    ('splash', {'mask': Mask(window=3, query_positions_BT=SEGMENTS)}, 'a window of stated positions'),
    ('splash', {'queries': 100}, '100 queries a device and 384 keys; both must be multiples of 128'),
    ('splash', {'keys': 128}, r'causal attention of more queries \(384\) than keys \(128\)'),
    ('cudnn', {}, 'float32; it has bfloat16 and float16'),
    ('cudnn', {'softcap': 2.0, 'dtype': jnp.bfloat16}, 'a soft-cap'),
    ('cudnn', {'drop': Dropout(0.1, jax.random.key), 'dtype': jnp.bfloat16}, 'dropout of attention weights'),
    ('cudnn', {'V': 16, 'dtype': jnp.bfloat16}, 'value heads of width 16 beside key heads of width 8'),
    ('cudnn', {'H': 12, 'V': 12, 'dtype': jnp.bfloat16}, 'heads of width 12'),
    ('cudnn', {'queries': 101, 'keys': 384, 'bias_BNTS': BIAS, 'dtype': jnp.bfloat16}, 'a bias on 101 queries'),
]


@pytest.mark.parametrize('backend, options, feature', LACKS)
def test_a_backend_asked_for_by_name_names_the_feature_it_lacks_and_auto_takes_another(backend, options, feature):
    inputs, platform = make_inputs(**options), {'splash': 'tpu', 'cudnn': 'gpu'}[backend]
    with pytest.raises(UserError, match=f"'{backend}' does not support {feature}.*choose 'auto'"):
        ops.choose_backend(backend, inputs, platform)
    assert ops.choose_backend('auto', inputs, platform) == 'reference'
    for name in ('blockwise', 'reference'):
        assert ops.choose_backend(name, inputs, platform) == name


def test_auto_takes_the_platforms_kernels_and_says_so_once(caplog):
    caplog.set_level(logging.INFO, 'transformer_jax')
    ops._say.cache_clear()
    inputs = make_inputs(dtype=jnp.bfloat16)
    for platform, expected in (('tpu', 'splash'), ('gpu', 'cudnn'), ('cpu', 'reference'), ('tpu', 'splash')):
        assert ops.choose_backend('auto', inputs, platform) == expected
    long = make_inputs(queries=2, keys=2048, bias_BNTS=BIAS)
    assert [ops.choose_backend('auto', long, platform) for platform in ('tpu', 'cpu')] == ['blockwise'] * 2
    assert [record.getMessage() for record in caplog.records] == [
        'attention on tpu runs as splash',
        'attention on gpu runs as cudnn',
        'attention on cpu runs as reference',
        'attention on tpu runs as blockwise (splash lacks a bias on the scores)',
        'attention on cpu runs as blockwise',
    ]
    with pytest.raises(UserError, match="'cudnn' does not support the platform 'cpu'; it needs an NVIDIA GPU"):
        ops.attention(*inputs[:3], Mask(), scale=1.0, backend='cudnn')


def test_a_config_knows_every_backend():
    assert set(config.BACKENDS) == {'auto', *ops.BACKENDS}
