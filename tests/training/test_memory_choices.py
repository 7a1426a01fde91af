"""Optimizer states which take less memory: 8-bit moments, factored moments, fp32 copies of bf16 parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.sharding import MeshConfig, make_mesh
from transformer_jax.training.config import OptimizerConfig
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.quantized_adam import SMALLEST, code_values, dequantize, quantize
from transformer_jax.training.state import abstract_state, state_shardings

RNG = np.random.default_rng(0)
CONSTANT = dict(schedule='constant', warmup_steps=0, learning_rate=1e-2, b1=0.9, b2=0.98)


def trajectory(config, params, gradients, axes=None):
    """Returns the parameters after each update, and the last state."""
    optimizer = make_optimizer(config, make_schedule(config, 8, 100), axes)

    @jax.jit
    def update(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state, history = jax.jit(optimizer.init)(params), []
    for gradient in gradients:
        params, state = update(params, state, gradient)
        history.append(params)
    return history, state


def test_codes_are_the_papers_dynamic_tree():
    """Released values of the paper's authors: largest below one .99296875 with a sign, .99648 without; smallest."""
    signed, unsigned = code_values(True), code_values(False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    np.testing.assert_allclose([signed[-1], signed[-2], signed[0]], [1, 0.99296875, -0.99296875], rtol=1e-6)
    np.testing.assert_allclose([unsigned[0], unsigned[1], unsigned[-2]], [0, 3.25e-7, 0.996484375], rtol=1e-6)
    np.testing.assert_allclose(signed[signed > 0].min(), 5.5e-7, rtol=1e-6)


@pytest.mark.parametrize('shape, axis', [((3, 600), 1), ((300, 5), 0), ((2, 64, 7), 1)])
@pytest.mark.parametrize('signed', [True, False])
def test_a_value_becomes_the_nearest_code_of_its_own_block(shape, axis, signed):
    x = (RNG.normal(size=shape) * 10.0 ** RNG.integers(-6, 1, size=shape)).astype(np.float32)
    x = x if signed else abs(x)
    codes, scales = jax.jit(quantize, static_argnums=(1, 2))(x, axis, signed)
    back = np.moveaxis(np.asarray(jax.jit(dequantize, static_argnums=(2, 3))(codes, scales, axis, signed)), axis, -1)
    assert codes.dtype == jnp.int8 and codes.shape == shape
    for row, own in zip(np.moveaxis(x, axis, -1).reshape(-1, shape[axis]), back.reshape(-1, shape[axis]), strict=True):
        for start in range(0, shape[axis], 256):
            block = row[start : start + 256]
            choices = code_values(signed) * abs(block).max()
            nearest = abs(block[:, None] - choices).min(1)
            np.testing.assert_allclose(abs(block - own[start : start + 256]), nearest, atol=1e-6 * abs(block).max())


def test_adam_with_8_bit_moments_follows_adam_and_keeps_a_quarter_of_the_bytes():
    """Moments are rounded by at most 1/128 of a value (7 bits of its digits), so steps differ by a few per cent."""
    params = {'w': jnp.asarray(RNG.normal(size=(64, 256)), jnp.float32), 'b': jnp.zeros(256)}
    gradients = [jax.tree.map(lambda x: jnp.asarray(RNG.normal(1, 0.5, size=x.shape), jnp.float32), params)
                 for _ in range(10)]  # fmt: skip
    full, state = trajectory(OptimizerConfig(**CONSTANT), params, gradients)
    small, small_state = trajectory(OptimizerConfig(**CONSTANT, moments='int8'), params, gradients)
    moved = np.abs(full[-1]['w'] - params['w']).mean()
    difference = np.abs(full[-1]['w'] - small[-1]['w'])
    assert 0 < difference.mean() < 0.02 * moved
    np.testing.assert_allclose(full[-1]['b'], small[-1]['b'], rtol=1e-6)  # too small to be quantised

    def size(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf.size >= SMALLEST)

    assert size(state) == 8 * 64 * 256 and size(small_state) == 2 * 64 * 256


def test_8_bit_moments_and_their_scales_lie_on_the_devices_of_their_parameter():
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    params = {'up': jax.ShapeDtypeStruct((64, 1024), jnp.float32)}
    placed = {'up': NamedSharding(mesh, PartitionSpec('fsdp', 'tensor'))}
    config = OptimizerConfig(**CONSTANT, moments='int8')
    optimizer = make_optimizer(config, make_schedule(config, 8, 100), {'up': ('embed', 'mlp')})
    abstract = abstract_state(params, optimizer)
    state = state_shardings(abstract, placed, NamedSharding(mesh, PartitionSpec())).opt_state[0]
    assert state.mu.values['up'] == placed['up']
    assert abstract.opt_state[0].mu.scales['up'].shape == (64, 4)
    assert state.mu.scales['up'].spec == PartitionSpec('fsdp', None)


def test_adafactor_is_the_papers_algorithm_4():
    """Factored second moment with decay 1 - n^-0.8, updates clipped to RMS 1, scaled by the matrix's own RMS."""
    start = RNG.normal(size=(128, 160)).astype(np.float32)
    gradients = [RNG.normal(size=start.shape).astype(np.float32) for _ in range(4)]
    config = OptimizerConfig(name='adafactor', schedule='constant', warmup_steps=0, learning_rate=1e-2)
    history, state = trajectory(config, {'w': jnp.asarray(start)}, [{'w': jnp.asarray(g)} for g in gradients])
    w, row, column = start.astype(np.float64), 0.0, 0.0
    for n, gradient in enumerate(gradients, 1):
        decay = 1 - n**-0.8
        squared = gradient.astype(np.float64) ** 2 + 1e-30
        row = decay * row + (1 - decay) * squared.mean(1)
        column = decay * column + (1 - decay) * squared.mean(0)
        update = gradient / np.sqrt(np.outer(row, column) / row.mean())
        update /= max(1.0, np.sqrt((update**2).mean()))
        w = w - 1e-2 * max(1e-3, np.sqrt((w**2).mean())) * update
        np.testing.assert_allclose(history[n - 1]['w'], w, rtol=2e-5, atol=2e-6)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 128 + 160 + 10


def test_bf16_parameters_with_master_copies_are_the_rounded_fp32_run():
    """Steps of 1e-4 are lost on bf16 parameters near 1, which have 8 bits; in the copies they add up."""
    choices = dict(schedule='constant', warmup_steps=0, learning_rate=1e-4)
    start = jnp.asarray(1 + RNG.random(size=(8, 4)), jnp.bfloat16)
    gradients = [{'w': jnp.asarray(RNG.normal(1, 0.1, size=(8, 4)), jnp.bfloat16)} for _ in range(60)]
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), gradient) for gradient in gradients]
    reference, _ = trajectory(OptimizerConfig(**choices), {'w': start.astype(jnp.float32)}, wide)
    ours, state = trajectory(OptimizerConfig(**choices, master='float32'), {'w': start}, gradients)
    lost, _ = trajectory(OptimizerConfig(**choices), {'w': start}, gradients)
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine['w'].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(mine['w']), np.asarray(theirs['w'].astype(jnp.bfloat16)))
    assert state.copies['w'].dtype == jnp.float32
    assert (np.asarray(ours[-1]['w']) != np.asarray(start)).mean() > 0.5
    np.testing.assert_array_equal(np.asarray(lost[-1]['w']), np.asarray(start))


def test_choices_which_mean_nothing_together_are_refused():
    with pytest.raises(UserError, match="optimizer.b1 = 0.5 means nothing to 'adafactor'"):
        OptimizerConfig(name='adafactor', b1=0.5)
    with pytest.raises(UserError, match="optimizer.moments = 'int8' means nothing to 'adafactor'"):
        OptimizerConfig(name='adafactor', moments='int8')
    with pytest.raises(UserError, match="optimizer.moments = 'int4' is unknown; did you mean 'int8'"):
        OptimizerConfig(moments='int4')
    with pytest.raises(UserError, match="optimizer.master = 'fp32' is unknown; did you mean 'float32'"):
        OptimizerConfig(master='fp32')
