"""Every kind of parallelism gives the loss, gradients and parameters of one device, and splits what it says it splits.

Two steps of the real train step are compared, with dropout everywhere, two micro-batches a step and packed rows, one of
which has no label. Rounding of fp32 sums in another order is about 1e-7 of their size; bounds are some ten times that.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parallel import CONFIG, EXPERTS, Parallel, collectives, packed_batch, random_params

from transformer_jax.models import abstract_params, build
from transformer_jax.sharding import MeshConfig, bytes_per_device, make_mesh, place_batch, resolve, tracing_on
from transformer_jax.training.config import TrainingConfig
from transformer_jax.training.step import make_gradient


@pytest.fixture(scope='module', autouse=True)
def quick_compilation():
    """Claims on values and on where they lie, which optimisations leave alone."""
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)


@functools.cache
def alone(config):
    return Parallel(config, MeshConfig(), jax.devices()[:1])


def assert_equal_but_for_rounding(many, one):
    np.testing.assert_allclose(many.losses, one.losses, rtol=2e-6)
    np.testing.assert_allclose(many.norm, one.norm, rtol=1e-5)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(one.gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * largest), many.gradients, one.gradients)
    # An update of 0.01 whose gradient is off by 1e-6 moves by less than 1e-6 of it; parameters are of size 1.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), many.params, one.params)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one.params, one.start)
    assert min(jax.tree.leaves(moved)) > 1e-4  # no parameter stands still, so none is compared in vain


def parts(array):
    """In how many different parts an array lies on its devices."""
    return len({str(shard.index) for shard in array.addressable_shards})


# What splits, in numbers: parts of a batch's tokens, parts of some parameters, collectives which must be there.
LAYOUTS = {
    'data': (CONFIG, dict(data=8), 8, {'decoder/layers_0/ffn/up/kernel': 1}, {'all-reduce'}),
    'fsdp': (
        CONFIG,
        dict(data=1, fsdp=8),
        8,
        {'decoder/layers_0/ffn/up/kernel': 8, 'embedding/embedding': 8, 'decoder/final_norm/scale': 8},
        {'all-reduce', 'all-gather'},
    ),
    'tensor': (
        CONFIG,
        dict(data=4, tensor=2),
        4,
        {
            'decoder/layers_0/attention/query/kernel': 2,
            'decoder/layers_0/attention/key/kernel': 2,
            'decoder/layers_0/ffn/down/kernel': 2,
            'embedding/embedding': 2,
            'decoder/final_norm/scale': 1,
        },
        {'all-reduce'},
    ),
    'sequence': (
        CONFIG.replace(attention_backend='blockwise'),
        dict(data=2, sequence=4),
        8,
        {'decoder/layers_0/ffn/up/kernel': 1},
        {'all-gather'},
    ),
    'expert': (
        EXPERTS,
        dict(data=1, expert=4, sequence=2),
        8,
        {'decoder/layers_0/ffn/experts_up/kernel': 4, 'decoder/layers_0/attention/query/kernel': 1},
        {'all-gather', 'reduce-scatter'},
    ),
    'mixed': (
        EXPERTS,
        dict(data=1, fsdp=2, expert=2, tensor=2),
        4,
        {'decoder/layers_0/ffn/experts_up/kernel': 8, 'decoder/layers_0/attention/query/kernel': 4},
        {'all-gather', 'reduce-scatter', 'all-reduce'},
    ),
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_a_step_on_eight_devices_is_that_of_one_and_is_split(name):
    config, sizes, batch_parts, split, expected = LAYOUTS[name]
    # Alone with all scores at once, so that blocks are held against another program too.
    one, many = alone(config.replace(attention_backend='auto')), Parallel(config, MeshConfig(**sizes))
    assert_equal_but_for_rounding(many, one)
    assert many.mesh.size == 8 and not collectives(one.text) and expected <= collectives(many.text).keys()
    placed = place_batch(packed_batch(), many.mesh)
    assert parts(placed['inputs']['target_tokens']) == batch_parts
    for path, count in split.items():
        for tree in (many.state.params, *many.moments()):
            assert parts(functools.reduce(dict.__getitem__, path.split('/'), tree)) == count, path
    if name == 'fsdp':
        # Everything but step, counters and rate is divided by eight.
        assert many.bytes < one.bytes / 8 + 100


def test_data_parallel_gradients_are_the_mean_over_devices_of_pmap():
    """An independent program: jax.pmap over eight devices, each with its rows, joined by lax.pmean."""
    config = CONFIG.replace(dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0)
    model, training, mesh = build(config), TrainingConfig(label_smoothing=0.1), make_mesh(MeshConfig())
    params = random_params(abstract_params(model)[0])
    batch = packed_batch()

    def ours(params, batch):
        with tracing_on(mesh):
            total, weight, gradient, *_ = make_gradient(model, training)(params, batch, jax.random.key(0))
        return total / weight, gradient

    loss, gradient = jax.jit(ours)(params, place_batch(batch, mesh))

    @functools.partial(jax.pmap, axis_name='devices', in_axes=(None, 0))
    def theirs(params, rows):
        weight = jax.lax.pmean(rows['weights'].sum(), 'devices')

        def mean_loss(params):
            log_probs = jax.nn.log_softmax(model.apply({'params': params}, **rows['inputs']).logits)
            right = jnp.take_along_axis(log_probs, rows['labels'][..., None], axis=-1)[..., 0]
            losses = -0.9 * right - 0.1 * log_probs.mean(axis=-1)
            return (losses * rows['weights']).sum() / weight

        return jax.lax.pmean(jax.value_and_grad(mean_loss)(params), 'devices')

    rows = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
    their_loss, their_gradient = jax.tree.map(lambda x: np.asarray(x)[0], theirs(params, rows))
    np.testing.assert_allclose(loss, their_loss, rtol=1e-6)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(their_gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * largest), gradient, their_gradient)


def test_bytes_per_device_of_each_layout_are_those_of_the_resolver():
    """The table's arithmetic against arrays which lie on devices, for the state of the mixed layout."""
    config, sizes, *_ = LAYOUTS['mixed']
    params, axes = abstract_params(build(config))
    mesh = make_mesh(MeshConfig(**sizes))
    shardings = resolve(params, axes, mesh)
    placed = jax.device_put(random_params(params), shardings)
    held = {device: 0 for device in mesh.devices.flat}
    for leaf in jax.tree.leaves(placed):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    whole = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(params))
    assert set(held.values()) == {bytes_per_device(placed)}
    assert bytes_per_device(placed) < whole / 3
