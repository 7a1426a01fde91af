"""Logical names become the shardings of the rules, and what cannot be split is refused by name, never replicated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.sharding import (
    DEFAULT_RULES,
    MeshConfig,
    bytes_per_device,
    check_memory,
    check_replicated,
    device_bytes,
    make_mesh,
    resolve,
    startup_table,
)
from transformer_jax.sharding import mesh as mesh_module

SHAPES = {
    'encoder': {
        'query': ((2, 8, 4, 6), ('layers', 'embed', 'heads', 'head_dim')),
        'up': ((8, 16), ('embed', 'mlp')),
        'experts': ((4, 8, 16), ('experts', 'embed', 'mlp')),
        'scale': ((8,), ('embed',)),
    },
    'embedding': ((24, 8), ('vocab', 'embed')),
    'step': ((), ()),
}


def trees(shapes):
    def is_entry(node):
        return isinstance(node, tuple)

    abstract = jax.tree.map(lambda entry: jax.ShapeDtypeStruct(entry[0], jnp.float32), shapes, is_leaf=is_entry)
    return abstract, jax.tree.map(lambda entry: entry[1], shapes, is_leaf=is_entry)


def specs(mesh_config, rules=DEFAULT_RULES):
    resolved = resolve(*trees(SHAPES), make_mesh(mesh_config), rules)
    return jax.tree.map(lambda sharding: tuple(sharding.spec), resolved)


def test_data_parallel_keeps_parameters_whole():
    assert specs(MeshConfig())['encoder']['experts'] == (None, None, None)
    assert jax.tree.leaves(specs(MeshConfig())) == []


def test_fsdp_splits_the_model_width_and_tensor_the_heads_ffn_and_vocabulary():
    assert specs(MeshConfig(fsdp=2, tensor=2)) == {
        'encoder': {
            'query': (None, 'fsdp', 'tensor', None),
            'up': ('fsdp', 'tensor'),
            'experts': (None, 'fsdp', 'tensor'),
            'scale': ('fsdp',),
        },
        'embedding': ('tensor', 'fsdp'),
        'step': (),
    }


def test_expert_parallel_splits_experts_and_a_rule_can_take_two_mesh_axes():
    assert specs(MeshConfig(expert=4))['encoder']['experts'] == ('expert', None, None)
    both = specs(MeshConfig(data=2, fsdp=4), {**DEFAULT_RULES, 'embed': ('data', 'fsdp')})
    assert both['encoder']['up'] == (('data', 'fsdp'), None)


def test_arrays_placed_so_have_the_shard_shapes_of_the_rules():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    abstract, axes = trees(SHAPES)
    shardings = resolve(abstract, axes, mesh)
    table = jax.device_put(np.arange(24 * 8, dtype=np.float32).reshape(24, 8), shardings['embedding'])
    assert {shard.data.shape for shard in table.addressable_shards} == {(12, 4)}


@pytest.mark.parametrize(
    'entry, message',
    [
        (
            ((8, 6, 3), ('embed', 'heads', 'head_dim')),
            "'block/w' (8, 6, 3): logical axis 'heads' of size 6 does not divide by mesh axis 'tensor' 4; choose a "
            "mesh which divides 6, or the rule 'heads': () to keep it whole",
        ),
        (
            ((8, 8), ('mlp', 'heads')),
            "'block/w' ('mlp', 'heads') asks for the mesh axis 'tensor' twice, by 'mlp' and 'heads'",
        ),
        (((8, 8), ('embed', 'embed')), "asks for the mesh axis 'fsdp' twice, by 'embed' and 'embed'"),
        (
            ((8, 8), ('embed', 'head')),
            "'block/w' has the logical axis 'head', for which there is no rule; did you mean 'heads'?",
        ),
        (((8, 8), ('embed',)), "'block/w' has shape (8, 8) but 1 logical axes ('embed',)"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(entry, message):
    with pytest.raises(UserError) as error:
        resolve(*trees({'block': {'w': entry}}), make_mesh(MeshConfig(fsdp=2, tensor=4)))
    assert message in str(error.value)


def test_a_repeated_mesh_axis_is_refused_on_one_device_too():
    with pytest.raises(UserError, match='twice'):
        resolve(*trees({'w': ((8, 8), ('embed', 'embed'))}), make_mesh(MeshConfig(), jax.devices()[:1]))


def test_a_rule_for_an_unknown_mesh_axis_and_a_differing_tree_are_refused():
    mesh = make_mesh(MeshConfig())
    abstract, axes = trees({'w': ((8,), ('embed',))})
    with pytest.raises(UserError, match="rule 'embed' names the mesh axis 'fdsp'; did you mean 'fsdp'?"):
        resolve(abstract, axes, mesh, {**DEFAULT_RULES, 'embed': ('fdsp',)})
    with pytest.raises(UserError, match='tree of logical axes differs'):
        resolve(abstract, {'v': ('embed',)}, mesh)


def test_the_table_shows_every_array_its_spec_and_its_bytes():
    table = startup_table(*trees(SHAPES), make_mesh(MeshConfig(fsdp=2, tensor=2)))
    assert table == '\n'.join(
        [
            'name             shape          dtype    logical axes                 spec             bytes per device',
            '---------------  -------------  -------  ---------------------------  ---------------  ----------------',
            'embedding        24 x 8         float32  vocab embed                  tensor fsdp                   192',
            'encoder/experts  4 x 8 x 16     float32  experts embed mlp            - fsdp tensor                 512',
            'encoder/query    2 x 8 x 4 x 6  float32  layers embed heads head_dim  - fsdp tensor -               384',
            'encoder/scale    8              float32  embed                        fsdp                           16',
            'encoder/up       8 x 16         float32  embed mlp                    fsdp tensor                   128',
            'step             scalar         float32  -                            -                               4',
            '1,225 values, 4,900 bytes in all, 1,236 bytes per device; mesh data 2 x fsdp 2 x tensor 2',
        ]
    )


def test_large_arrays_left_whole_are_refused_by_name_where_the_mesh_could_split_them():
    shapes = {
        'table': ((1024, 1024), ('positions', None)),
        'small': ((4,), ('positions',)),
        'split': SHAPES['embedding'],
    }
    abstract, axes = trees(shapes)
    check_replicated(abstract, axes, make_mesh(MeshConfig()), limit_bytes=2**20)
    mesh = make_mesh(MeshConfig(fsdp=2))
    check_replicated(abstract, axes, mesh, limit_bytes=2**22)
    with pytest.raises(UserError) as error:
        check_replicated(abstract, axes, mesh, limit_bytes=2**20)
    assert "table (1024, 1024) ('positions', None) of 4,194,304 bytes;" in str(error.value)
    assert 'small' not in str(error.value) and 'split' not in str(error.value)


def test_a_state_is_held_against_the_memory_of_a_device_and_refused_above_it():
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    memory = device_bytes(jax.devices()[0])
    columns = NamedSharding(mesh, PartitionSpec('fsdp'))

    def state(numbers):
        return {'w': jax.ShapeDtypeStruct((numbers,), jnp.float32, sharding=columns)}

    per_device = memory // 16
    line = check_memory(state(per_device // 4 * 8), mesh)
    assert f'{per_device // 4 * 4:,} bytes of the {memory:,} of each cpu device (6.2 %)' in line
    with pytest.raises(UserError, match='bytes on each device, and a cpu has .*; raise mesh.fsdp or mesh.tensor'):
        check_memory(state((memory // 4 + 1) * 8), mesh)


def test_auto_asks_the_resolver_what_each_mesh_would_hold(monkeypatch):
    abstract, axes = trees(SHAPES)

    def need(mesh):
        shardings = resolve(abstract, axes, mesh)
        return bytes_per_device(
            jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
        )

    # Whole, the arrays take 4,900 bytes, by two 2,452 and by four 1,228.
    for memory, fsdp in ((9800, 1), (9798, 2), (4904, 2), (4902, 4)):
        monkeypatch.setattr(mesh_module, 'device_bytes', lambda device, memory=memory: memory)
        assert make_mesh(MeshConfig(layout='auto'), need=need).shape['fsdp'] == fsdp
