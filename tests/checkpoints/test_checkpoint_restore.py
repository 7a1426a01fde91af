"""Parameters alone, in part or averaged, out of a checkpoint and without the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_state
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.checkpoints import CheckpointManager, average_params, list_arrays, restore_params, restore_partial
from transformer_jax.errors import UserError


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run directory with steps 1, 2, 3 and 4, each with other parameters."""
    folder = tmp_path_factory.mktemp('run')
    states = {step: small_state.make_state(seed=step, step=step) for step in (1, 2, 3, 4)}
    with CheckpointManager(folder / 'checkpoints', keep=None) as manager:
        for step, state in states.items():
            manager.save(step, state, {})
    return folder, {step: jax.tree.map(np.asarray, state.params) for step, state in states.items()}


def test_parameters_come_as_host_arrays_from_any_of_the_three_folders(run):
    folder, params = run
    for place, step in ((folder, None), (folder / 'checkpoints', 4), (folder / 'checkpoints' / '4', None)):
        restored = restore_params(place, step)
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(restored))
        small_state.assert_bit_equal(restored, params[4])
    small_state.assert_bit_equal(restore_params(folder, 2), params[2])
    small_state.assert_bit_equal(restore_params(folder / 'checkpoints' / '2'), params[2])


def test_the_moving_average_is_a_choice(run):
    folder, params = run
    halves = jax.tree.map(lambda leaf: (leaf / 2).astype(leaf.dtype), params[3])
    small_state.assert_bit_equal(restore_params(folder, 3, ema=True), halves)


def test_parameters_go_straight_into_shardings(run):
    folder, params = run
    mesh = small_state.make_mesh(2, 4)
    abstract = small_state.place(mesh, params[1])
    restored = restore_params(folder, 1, jax.tree.map(lambda struct: struct.sharding, abstract), abstract=abstract)
    small_state.assert_bit_equal(restored, params[1])
    assert restored['embedding'].sharding.spec == PartitionSpec('rows', 'columns')
    everywhere = restore_params(folder, 1, NamedSharding(mesh, PartitionSpec()))
    assert len(everywhere['embedding'].sharding.device_set) == 8
    with pytest.raises(UserError, match='no sharding is given for encoder/layers_0/mlp/bias'):
        restore_params(folder, 1, {'embedding': NamedSharding(mesh, PartitionSpec())})


def test_restoring_parameters_is_strict_unless_allowed(run, caplog):
    folder, _ = run
    larger = small_state.place(None, jax.eval_shape(lambda: small_state.make_params(layers=3)))
    with pytest.raises(UserError, match=r'missing from the checkpoint \(2\): encoder/layers_2/mlp/bias'):
        restore_params(folder, abstract=larger)
    restored = restore_params(folder, abstract=larger, allow_missing=['encoder/layers_2/.*'])
    assert sorted(restored['encoder']) == ['layers_0', 'layers_1']
    assert 'encoder/layers_2/mlp/bias, encoder/layers_2/mlp/kernel' in caplog.text
    smaller = small_state.place(None, jax.eval_shape(lambda: small_state.make_params(layers=1)))
    with pytest.raises(UserError, match=r'not in the state \(2\): encoder/layers_1/mlp/bias'):
        restore_params(folder, abstract=smaller, allow_missing=['.*'])


def test_a_part_is_taken_by_pattern_and_the_rest_is_listed(run):
    folder, params = run
    mesh = small_state.make_mesh(2, 2)
    fresh = small_state.put(mesh, {**small_state.make_params(seed=50), 'head': jnp.zeros((8, 4))})
    result = restore_partial(folder, fresh, ['encoder/layers_[01]/.*kernel'], step=2)
    assert result.taken == ['encoder/layers_0/mlp/kernel', 'encoder/layers_1/mlp/kernel']
    assert result.kept == ['embedding', 'encoder/layers_0/mlp/bias', 'encoder/layers_1/mlp/bias', 'head']
    assert result.unused == ['embedding', 'encoder/layers_0/mlp/bias', 'encoder/layers_1/mlp/bias']
    kernel = result.params['encoder']['layers_1']['mlp']['kernel']
    np.testing.assert_array_equal(kernel, params[2]['encoder']['layers_1']['mlp']['kernel'])
    assert kernel.sharding.is_equivalent_to(fresh['encoder']['layers_1']['mlp']['kernel'].sharding, 2)
    assert result.params['embedding'] is fresh['embedding']
    with pytest.raises(UserError, match="no parameter's whole name matches 'encodr/.*'; there are embedding"):
        restore_partial(folder, fresh, ['encodr/.*'])
    with pytest.raises(UserError, match=r'missing from the checkpoint \(1\): head \(8, 4\) float32'):
        restore_partial(folder, fresh, ['embedding', 'head'])
    with pytest.raises(UserError, match=r"'\(' is no regular expression"):
        restore_partial(folder, fresh, ['('])
    with pytest.raises(UserError, match=r"write \['embedding'\]"):
        restore_partial(folder, fresh, 'embedding')


def test_the_average_is_numpys_mean_in_float64(run):
    folder, params = run
    for n, step, chosen in ((3, None, (2, 3, 4)), (2, 3, (2, 3)), (1, None, (4,))):
        average = average_params(folder, n, step)
        expected = jax.tree.map(
            lambda *leaves: np.mean(np.stack(leaves).astype(np.float64), 0).astype(leaves[0].dtype),
            *(params[step] for step in chosen),
        )
        small_state.assert_bit_equal(average, expected)
    with pytest.raises(UserError, match='cannot average 5 checkpoints of .*: there are 4 up to step 4'):
        average_params(folder, 5)
    with pytest.raises(UserError, match='cannot average 0'):
        average_params(folder, 0)


def test_what_is_not_there_is_an_error_and_never_the_untouched_target(run, tmp_path):
    folder, _ = run
    for read in (restore_params, list_arrays, lambda path: average_params(path, 1)):
        with pytest.raises(UserError, match='nowhere does not exist; give a run directory'):
            read(tmp_path / 'nowhere')
        with pytest.raises(UserError, match='there is no finished checkpoint in '):
            read(tmp_path)
    with pytest.raises(UserError, match='there is no checkpoint 7 in .*; there are 1, 2, 3, 4'):
        restore_params(folder, 7)
    with pytest.raises(UserError, match='is the folder of step 4, but step 3 was asked for'):
        restore_params(folder / 'checkpoints' / '4', 3)
    with CheckpointManager(tmp_path / 'bare') as manager:
        manager.save(1, {'params': {'w': jnp.zeros(2)}}, {})
    with pytest.raises(UserError, match='holds no moving average'):
        restore_params(tmp_path / 'bare', ema=True)
