"""A mesh has the shape asked for, or says in words why it cannot."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.sharding import (
    DEFAULT_RULES,
    MESH_AXES,
    MeshConfig,
    batch_sharding,
    check_batch,
    make_mesh,
    place_batch,
)
from transformer_jax.sharding.mesh import auto_sizes


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
        assert placed[name].sharding == batch_sharding(mesh, array.ndim)
        assert {shard.data.shape[0] for shard in placed[name].addressable_shards} == {2}
    assert len({str(shard.index) for shard in placed['labels'].addressable_shards}) == 4
    alone = make_mesh(MeshConfig(), jax.devices()[:1])
    np.testing.assert_array_equal(place_batch(batch, alone)['labels'], batch['labels'])


def test_positions_go_to_sequence_devices_in_arrays_of_rows_and_positions_only():
    mesh = make_mesh(MeshConfig(data=2, sequence=4))
    batch = {'tokens': np.arange(32).reshape(4, 8), 'images': np.zeros((4, 8, 8, 3)), 'lengths': np.arange(4)}
    placed = place_batch(batch, mesh)
    shapes = {name: {shard.data.shape for shard in array.addressable_shards} for name, array in placed.items()}
    assert shapes == {'tokens': {(2, 2)}, 'images': {(2, 8, 8, 3)}, 'lengths': {(2,)}}
    np.testing.assert_array_equal(placed['tokens'], batch['tokens'])
    with pytest.raises(UserError, match='a row of 6 positions does not divide into 4 sequence devices'):
        place_batch({'tokens': np.zeros((4, 6))}, mesh)


def test_auto_splits_the_state_over_as_few_devices_as_memory_asks():
    shape = MeshConfig(tensor=2, layout='auto').shape(16)

    def chosen(whole, memory, refused=()):
        def need(mesh):
            assert mesh.size == 16 and mesh.shape['tensor'] == 2
            if mesh.shape['fsdp'] in refused:
                raise UserError('does not divide')
            return whole // mesh.shape['fsdp']

        found = auto_sizes(shape, need, memory)
        return found['data'], found['fsdp']

    assert chosen(whole=50, memory=100) == (8, 1)
    assert chosen(whole=51, memory=100) == (4, 2)
    assert chosen(whole=200, memory=100) == (2, 4)
    assert chosen(whole=200, memory=100, refused=(4,)) == (1, 8)
    assert chosen(whole=800, memory=100) == (1, 8)  # the state takes all of a device; the compiler has the last word
    with pytest.raises(UserError, match='need 101 bytes per device even with mesh.fsdp = 8, and a device has 100'):
        chosen(whole=808, memory=100)
    with pytest.raises(UserError, match="'auto' chooses mesh.data and mesh.fsdp itself"):
        MeshConfig(fsdp=2, layout='auto')
    assert dict(make_mesh(MeshConfig(sequence=2, layout='auto')).shape)['data'] == 4


def test_rules_of_the_config_change_the_default_ones_or_are_refused_with_the_nearest_name():
    rules = MeshConfig(rules='kv_heads=none, vocab=tensor+fsdp').logical_rules
    assert rules == {**DEFAULT_RULES, 'kv_heads': (), 'vocab': ('tensor', 'fsdp')}
    for text, message in (
        ('kv_head=none', "the logical axis 'kv_head'; did you mean 'kv_heads'?"),
        ('vocab=tensr', "gives 'vocab' the mesh axis 'tensr'; did you mean 'tensor'?"),
        ('vocab', "has 'vocab'; a rule is NAME=AXIS"),
    ):
        with pytest.raises(UserError) as error:
            MeshConfig(rules=text)
        assert message in str(error.value)


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
