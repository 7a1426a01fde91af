"""A mesh has the shape asked for, or says in words why it cannot."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.sharding import MESH_AXES, MeshConfig, batch_sharding, check_batch, make_mesh, place_batch


def test_the_axis_of_size_minus_one_takes_what_is_left_over():
    assert dict(make_mesh(MeshConfig()).shape) == dict(data=8, fsdp=1, expert=1, sequence=1, tensor=1)
    mesh = make_mesh(MeshConfig(data=1, fsdp=-1, tensor=2))
    assert tuple(mesh.axis_names) == MESH_AXES and mesh.devices.shape == (1, 4, 1, 1, 2)
    assert make_mesh(MeshConfig(data=2), jax.devices()[:2]).devices.size == 2
    assert MeshConfig(tensor=4, expert=2).shape(64)['data'] == 8


@pytest.mark.parametrize(
    'sizes, message',
    [
        (dict(data=2, fsdp=2), 'mesh data 2 x fsdp 2 needs 4 devices, but there are 8'),
        (dict(data=1), 'mesh all axes 1 needs 1 devices, but there are 8'),
        (dict(tensor=3), 'mesh tensor 3 = 3 does not divide 8 devices, so nothing whole is left for data'),
        (dict(fsdp=-1), 'mesh.data and mesh.fsdp are -1; only one axis'),
        (dict(tensor=0), 'mesh.tensor = 0 is no number of devices'),
        (dict(data=-2), 'mesh.data = -2 is no number of devices'),
    ],
)
def test_sizes_which_do_not_fit_are_refused_in_words(sizes, message):
    with pytest.raises(UserError) as error:
        make_mesh(MeshConfig(**sizes))
    assert message in str(error.value)


def test_rows_go_to_data_and_fsdp_devices_and_are_whole_on_tensor_devices():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    batch = {'labels': np.arange(24).reshape(8, 3), 'example_ids': np.arange(8)}
    placed = place_batch(batch, mesh)
    for name, array in batch.items():
        np.testing.assert_array_equal(placed[name], array)
        assert placed[name].sharding == batch_sharding(mesh)
        assert {shard.data.shape[0] for shard in placed[name].addressable_shards} == {2}
    assert len({str(shard.index) for shard in placed['labels'].addressable_shards}) == 4
    alone = make_mesh(MeshConfig(), jax.devices()[:1])
    np.testing.assert_array_equal(place_batch(batch, alone)['labels'], batch['labels'])


def test_a_batch_which_does_not_divide_is_refused_in_words():
    mesh = make_mesh(MeshConfig(data=4, fsdp=2))
    check_batch(16, mesh)
    with pytest.raises(UserError) as error:
        check_batch(12, mesh)
    assert str(error.value) == (
        'a batch of 12 rows does not divide into 8 data devices (data 4 x fsdp 2); choose 8 or 16 rows, or another mesh'
    )
    with pytest.raises(UserError, match='batch of 1 rows .* choose 8 rows'):
        place_batch({'labels': np.zeros((1, 3))}, mesh)
    with pytest.raises(UserError, match='batch of 0 rows'):
        check_batch(0, mesh)
