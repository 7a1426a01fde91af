"""A checkpoint gives back the same bits on any mesh, strictly, and only what should be kept is kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_state

from transformer_jax.checkpoints import CheckpointManager, list_arrays, read_metadata
from transformer_jax.errors import UserError

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, 'PYTHONPATH': f'{HERE.parents[1]}{os.pathsep}{HERE}', 'JAX_PLATFORMS': 'cpu'}
FRESH_PROCESS = """
import hashlib, json, sys
import jax
import small_state
from transformer_jax.checkpoints import CheckpointManager
like = jax.eval_shape(small_state.make_state)
assert jax.device_count() == 1
restored = CheckpointManager(sys.argv[1], read_only=True).restore(small_state.place(small_state.make_mesh(1, 1), like))
digest = hashlib.sha256(b''.join(small_state.raw(leaf).tobytes() for leaf in jax.tree.leaves(restored.state)))
print(json.dumps([restored.step, digest.hexdigest()]))
"""


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A state saved from a mesh of 2 x 4 devices."""
    directory = tmp_path_factory.mktemp('run') / 'checkpoints'
    state = small_state.make_state()
    with CheckpointManager(directory) as manager:
        manager.save(7, small_state.put(small_state.make_mesh(2, 4), state), {'position': 7})
    return directory, state


@pytest.mark.parametrize('shape', [(1, 1), (2, 2), (8, 1), (2, 4)])
def test_restore_on_another_mesh_is_bit_equal_and_placed_as_asked(saved, shape):
    directory, state = saved
    abstract = small_state.place(small_state.make_mesh(*shape), state)
    restored = CheckpointManager(directory, read_only=True).restore(abstract)
    small_state.assert_bit_equal(restored.state, state)
    assert restored.step == 7 and restored.metadata == {'position': 7} and restored.skipped == ()
    for array, struct in zip(jax.tree.leaves(restored.state), jax.tree.leaves(abstract), strict=True):
        assert array.sharding.is_equivalent_to(struct.sharding, array.ndim)
    table = restored.state.params['embedding']
    assert {shard.data.shape for shard in table.addressable_shards} == {(24 // shape[0], 8 // shape[1])}


def test_restore_in_a_process_with_one_device_is_bit_equal(saved):
    directory, state = saved
    result = subprocess.run(
        [sys.executable, '-c', FRESH_PROCESS, str(directory)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    expected = hashlib.sha256(b''.join(small_state.raw(leaf).tobytes() for leaf in jax.tree.leaves(state)))
    assert json.loads(result.stdout) == [7, expected.hexdigest()]


def test_two_processes_restore_what_one_saved_and_the_reverse_skipping_damage_alike(saved, tmp_path):
    directory, state = saved
    source, target = tmp_path / 'source', tmp_path / 'target'
    shutil.copytree(directory, source)
    shutil.copytree(directory / '7', source / '11')
    (source / '11' / 'arrays' / 'step' / '0').unlink()  # One of the two processes finds it missing, both skip.
    with socket.socket() as free:
        free.bind(('localhost', 0))
        address = f'localhost:{free.getsockname()[1]}'
    command = [sys.executable, str(HERE / 'one_of_two.py'), address]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(source), str(target)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        step, (skipped,), steps = json.loads(output.splitlines()[-1])
        assert step == 7 and steps == [9] and skipped.startswith('checkpoint 11 is damaged')
    restored = CheckpointManager(target, read_only=True).restore(small_state.place(small_state.make_mesh(2, 4), state))
    small_state.assert_bit_equal(restored.state, state)
    assert restored.step == 9 and restored.metadata == {'position': 9}


def test_without_shardings_numpy_arrays_come_back(saved):
    directory, state = saved
    restored = CheckpointManager(directory, read_only=True).restore(small_state.place(None, state))
    small_state.assert_bit_equal(restored.state, state)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored.state.params))


def test_values_are_those_at_the_call_though_the_buffers_are_donated(tmp_path):
    state = {'params': {'w': jnp.arange(2**20, dtype=jnp.float32)}}
    overwrite = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0 - 1, state), donate_argnums=0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state, {})
        jax.block_until_ready(overwrite(state))
        restored = manager.restore({'params': {'w': jax.ShapeDtypeStruct((2**20,), jnp.float32)}})
    np.testing.assert_array_equal(restored.state['params']['w'], np.arange(2**20, dtype=np.float32))


def test_arrays_lie_under_readable_names_and_nothing_is_pickled(saved):
    directory, _ = saved
    folders = {child.name for child in (directory / '7' / 'arrays').iterdir() if child.is_dir()}
    assert 'params.encoder.layers_0.mlp.kernel' in folders and 'opt_state.1.0.mu.embedding' in folders
    files = [path for path in directory.rglob('*') if path.is_file()]
    assert not any(path.read_bytes().startswith(b'\x80') and b'pickle' in path.read_bytes() for path in files)


def test_arrays_and_metadata_are_read_without_loading(saved):
    directory, state = saved
    arrays = list_arrays(directory.parent)
    assert arrays['params/encoder/layers_1/mlp/bias'] == ((16,), 'bfloat16', 32)
    assert arrays['key'] == ((), 'key:threefry2x32', 8)
    assert sum(info.bytes for info in arrays.values()) == sum(len(small_state.raw(x)) for x in jax.tree.leaves(state))
    metadata = read_metadata(directory / '7')
    assert metadata['position'] == metadata['step'] == 7 and metadata['versions']['jax'] == jax.__version__


def wrong(change):
    """The abstract state of `small_state` after `change(state)`, which returns the changed one."""
    return small_state.place(None, jax.eval_shape(lambda: change(small_state.make_state())))


def renamed(state):
    encoder = dict(state.params['encoder'])
    encoder['layers_9'] = encoder.pop('layers_1')
    return state.replace(params={**state.params, 'encoder': encoder})


@pytest.mark.parametrize(
    'change, phrases',
    [
        (lambda state: small_state.make_state(layers=3), ['missing from the checkpoint (8)', 'ema/encoder/layers_2']),
        (lambda state: small_state.make_state(layers=1), ['not in the state (8)', 'opt_state/1/0/nu/encoder/layers_1']),
        (renamed, ['missing from the checkpoint (2)', 'params/encoder/layers_9', 'not in the state (2)', 'layers_1']),
        (
            lambda state: small_state.make_state(width=16),
            ['shape differs (12)', 'params/embedding is (24, 8) in the checkpoint and (24, 16) in the state'],
        ),
        (
            lambda state: state.replace(step=jnp.float32(0)),
            ['dtype differs (1)', 'step is int32 in the checkpoint and float32 in the state'],
        ),
        (
            lambda state: state.replace(opt_state=optax.sgd(0.1, momentum=0.9).init(state.params)),
            ['opt_state/0/trace/embedding', 'not in the state (11)', 'opt_state/1/0/mu/embedding'],
        ),
        (lambda state: state.replace(ema=None), ['not in the state (5)', 'ema/embedding']),
        (lambda state: state.replace(key=jax.random.key(0, impl='rbg')), ['key is key:threefry2x32', 'key:rbg']),
    ],
)
def test_every_difference_is_listed_by_name(saved, change, phrases):
    directory, _ = saved
    with pytest.raises(UserError) as error:
        CheckpointManager(directory, read_only=True).restore(wrong(change))
    for phrase in phrases:
        assert phrase in str(error.value)
    assert '\n' not in str(error.value)


def save_all(manager, metrics):
    for step, bleu in metrics.items():
        manager.save(step, {'w': jnp.full(3, step)}, {'metrics': {} if bleu is None else {'bleu': np.float32(bleu)}})
    manager.wait()


def test_the_newest_and_the_best_are_kept(tmp_path):
    with CheckpointManager(tmp_path, keep=2, best_metric='bleu') as manager:
        save_all(manager, {1: 3.0, 2: 9.0, 3: float('nan'), 4: 5.0, 5: None})
        assert manager.steps() == [2, 4, 5] and manager.best_step() == 2 and manager.latest_step() == 5
        save_all(manager, {6: 9.0})
        assert manager.steps() == [5, 6] and manager.best_step() == 6
    assert sorted(child.name for child in tmp_path.iterdir()) == ['.lock', '5', '6']


def test_the_smallest_is_best_for_a_loss_and_none_keeps_all(tmp_path):
    with CheckpointManager(tmp_path, keep=None, best_metric='bleu', best_mode='min') as manager:
        save_all(manager, {1: 3.0, 2: 9.0, 3: 4.0, 4: 5.0})
        assert manager.steps() == [1, 2, 3, 4] and manager.best_step() == 1
        assert manager.metadata(3) == {'metrics': {'bleu': 4.0}}


def test_a_step_saved_twice_is_written_once_and_an_earlier_run_s_is_replaced(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        assert manager.save(5, {'w': jnp.zeros(3)}, {})
        assert not manager.save(5, {'w': jnp.zeros(3)}, {})
        manager.save(9, {'w': jnp.zeros(3)}, {})
    with CheckpointManager(tmp_path, keep=1) as manager:
        assert manager.save(9, {'w': jnp.ones(3)}, {})
        manager.wait()
        abstract = {'w': jax.ShapeDtypeStruct((3,), jnp.float32)}
        np.testing.assert_array_equal(manager.restore(abstract, step=9).state['w'], np.ones(3))
        assert manager.steps() == [9]


def test_training_on_from_an_earlier_step_is_refused_while_newer_ones_would_be_taken_instead(tmp_path):
    abstract = {'w': jax.ShapeDtypeStruct((3,), jnp.float32)}
    with CheckpointManager(tmp_path) as manager:
        for step in (2, 4, 6):
            manager.save(step, {'w': jnp.full(3, step, jnp.float32)}, {})
    with CheckpointManager(tmp_path) as manager:
        state = manager.restore(abstract, step=2).state
        with pytest.raises(UserError, match='checkpoint 3 would be older than 6 in .*; .* move 4, 6 away'):
            manager.save(3, state, {})
        assert manager.steps() == [2, 4, 6]
        for step in (4, 6):
            (tmp_path / str(step)).rename(tmp_path / f'aside_{step}')
        manager.save(3, state, {})
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(abstract).step == 3


def test_what_a_user_does_wrong_is_said_in_one_line(tmp_path):
    with CheckpointManager(tmp_path / 'a') as manager:
        with pytest.raises(UserError, match='no finished checkpoint in .*a'):
            manager.restore({}, step=3)
        with pytest.raises(UserError, match='no intact checkpoint'):
            manager.restore({})
        with pytest.raises(UserError, match='holds a set, which is not JSON'):
            manager.save(1, {'w': jnp.zeros(3)}, {'seen': {1}})
        with pytest.raises(UserError, match="'step' is a int"):
            manager.save(1, {'step': 1}, {})
        with pytest.raises(UserError, match="'a.b' and 'a/b'|'a/b' and 'a.b'"):
            manager.save(1, {'a.b': jnp.zeros(1), 'a': {'b': jnp.zeros(1)}}, {})
        manager.save(1, {'w': jnp.zeros(3)}, {})
        manager.wait()
        with pytest.raises(UserError, match='no checkpoint 3 in .*; there are 1'):
            manager.restore({}, step=3)
    with pytest.raises(UserError, match='keep = 0'):
        CheckpointManager(tmp_path, keep=0)
    with pytest.raises(UserError, match="did you mean 'max'"):
        CheckpointManager(tmp_path, best_mode='mx')
    with pytest.raises(UserError, match='reading only'):
        CheckpointManager(tmp_path, read_only=True).save(1, {}, {})
