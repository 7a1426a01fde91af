"""The two ways in which tokens reach their experts' devices give the same numbers.

`ragged_all_to_all` exists on TPU and GPU only, so here it is stood in for by its own definition, written with
all_gather; that it lowers for a TPU as it stands is held besides.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from transformer_jax.ops import experts
from transformer_jax.sharding import MeshConfig, make_mesh

E, K, D, F = 8, 2, 6, 10
MESH = make_mesh(MeshConfig(data=1, expert=4, tensor=2))
PLACE = experts.Place(rows=('expert',), expert='expert', tensor='tensor', shards=4)


def by_definition(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What jax.lax.ragged_all_to_all is documented to do: slice s of each sender lands at its output offset here."""
    me = jax.lax.axis_index(axis_name)
    every = [jax.lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)]
    for sender in range(4):
        rows, start, size, goal = every[0][sender], *(x[sender, me] for x in every[1:])
        place = jnp.arange(output.shape[0])
        mine = (place >= goal) & (place < goal + size)
        output = jnp.where(mine[:, None], rows[jnp.clip(place - goal + start, 0, rows.shape[0] - 1)], output)
    return output


def kernel(exchange):
    place = dataclasses.replace(PLACE, exchange=exchange)
    tokens, columns = PartitionSpec('expert'), PartitionSpec('expert', None, 'tensor')
    matrices = experts.Kernels(columns, columns, PartitionSpec('expert', 'tensor'))
    local = functools.partial(experts._local, place=place, activation=jax.nn.silu, rate=0.3)
    return jax.shard_map(
        local, mesh=MESH, in_specs=(tokens, tokens, tokens, matrices, PartitionSpec()), out_specs=tokens
    )


@pytest.fixture(scope='module')
def arguments():
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 3, D)).astype(np.float32)
    chosen = np.argsort(random.random((8, 3, E)), axis=-1)[..., :K]
    chosen[:3] = 7  # one expert has most of the choices of three rows, and some tokens are nobody's
    chosen[5, 1:] = E
    weights = random.random((8, 3, K)).astype(np.float32)
    shapes = ((E, D, F), (E, D, F), (E, F, D))
    kernels = experts.Kernels(*((0.4 * random.normal(size=shape)).astype(np.float32) for shape in shapes))
    return x, jnp.asarray(chosen, jnp.int32), weights, kernels, jax.random.key(1)


def results(function, arguments):
    x, chosen, weights, kernels, key = arguments

    def total(x, weights, kernels):
        y = function(x, chosen, weights, kernels, key)
        return jnp.sum(jnp.sin(y)), y

    (_, y), slopes = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(x, weights, kernels)
    return jax.device_get((y, slopes))


def test_both_exchanges_and_one_device_give_the_same_numbers(arguments, monkeypatch):
    monkeypatch.setattr(jax.lax, 'ragged_all_to_all', by_definition)
    local = functools.partial(experts._local, place=experts.Place(), activation=jax.nn.silu, rate=0.3)
    alone = results(local, arguments)
    for exchange in ('gather', 'ragged'):
        found = results(kernel(exchange), arguments)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(a).max()), alone, found)
    assert np.any(alone[0][:3]) and not np.any(alone[0][5, 1:])


def test_the_ragged_exchange_lowers_for_tpus(arguments):
    def total(x, weights, kernels, chosen, key):
        return kernel('ragged')(x, chosen, weights, kernels, key).sum()

    x, chosen, weights, kernels, key = arguments
    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(x, weights, kernels, chosen, key)
    text = traced.lower(lowering_platforms=('tpu',)).as_text()
    assert text.count('ragged_all_to_all') >= 4  # there and back, forward and backward
