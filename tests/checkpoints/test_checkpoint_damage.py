"""No kill and no damaged file costs an earlier checkpoint, and what is skipped is skipped with a reason."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import dying_writer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.checkpoints import CheckpointManager, restore_params
from transformer_jax.errors import UserError

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, 'PYTHONPATH': f'{HERE.parents[1]}{os.pathsep}{HERE}', 'JAX_PLATFORMS': 'cpu'}


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, str(HERE / 'dying_writer.py'), *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    """{moment: directory} of writers killed with SIGKILL, all started together since starting is what costs."""
    directories = {moment: tmp_path_factory.mktemp(moment) for moment in dying_writer.MOMENTS}
    writers = {moment: start(directory, moment) for moment, directory in directories.items()}
    for line in writers['any'].stdout:
        if line.strip() == '6':
            writers['any'].send_signal(signal.SIGKILL)
    for moment, writer in writers.items():
        _, errors = writer.communicate(timeout=100)
        assert writer.returncode == -signal.SIGKILL, (moment, errors)
    return directories


@pytest.mark.faults
@pytest.mark.parametrize('moment', dying_writer.MOMENTS)
def test_kill_9_while_saving_leaves_the_newest_finished_step(killed, moment, caplog):
    directory = killed[moment]
    left = {child.name for child in directory.iterdir() if child.name.isdecimal()}
    with CheckpointManager(directory) as manager:
        steps = manager.steps()
        if moment == 'any':
            assert steps and steps[-1] >= 4
        else:
            assert steps == ([2] if moment == 'pruning' else [1])
            assert left == {'1', '2'}
            assert f'removing checkpoint {1 if moment == "pruning" else 2} ' in caplog.text
        assert {child.name for child in directory.iterdir() if child.name.isdecimal()} == set(map(str, steps))
        expected = dying_writer.contents(steps[-1])
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), expected)
        restored = manager.restore(abstract)
        assert restored.step == steps[-1] and restored.metadata == {'position': steps[-1]}
        jax.tree.map(np.testing.assert_array_equal, restored.state, expected)
        manager.save(99, expected, {})
    assert manager.latest_step() == 99


def state_of(step: int) -> dict:
    return {'params': {'a': jnp.full((40, 50), step, jnp.float32), 'b': jnp.full(3, step)}, 'step': jnp.int32(step)}


ABSTRACT = jax.eval_shape(lambda: state_of(0))


@pytest.fixture(scope='module')
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp('intact')
    with CheckpointManager(directory) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), {'position': step})
    return directory


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    'flipped byte': ('arrays/params.a/0.0', flip, 'arrays/params.a/0.0 was altered'),
    'truncated': ('arrays/params.a/0.0', lambda path: os.truncate(path, 100), 'has 100 bytes instead of 8000'),
    'missing': ('arrays/params.a/0.0', Path.unlink, 'arrays/params.a/0.0 is missing'),
    'unreadable': ('arrays/params.b/0', make_unreadable, 'params.b/0 cannot be read: Is a directory'),
    'flipped byte of a description': ('arrays/params.b/.zarray', flip, '.zarray was altered'),
    'altered manifest': ('manifest.json', flip, 'manifest.json'),
    'truncated manifest': ('manifest.json', lambda path: os.truncate(path, 50), 'is not a whole JSON record'),
    'empty manifest': ('manifest.json', lambda path: os.truncate(path, 0), 'is not a whole JSON record'),
}


@pytest.mark.parametrize('kind', DAMAGE)
def test_a_damaged_newest_checkpoint_is_skipped_with_its_reason(intact, tmp_path, caplog, kind):
    directory = tmp_path / 'checkpoints'
    shutil.copytree(intact, directory)
    name, harm, reason = DAMAGE[kind]
    harm(directory / '3' / name)
    with pytest.raises(UserError, match='checkpoint 3 .*damaged'):
        restore_params(directory, step=3)
    np.testing.assert_array_equal(restore_params(tmp_path)['b'], np.full(3, 2))
    with pytest.raises(UserError, match='no intact checkpoint in .*: checkpoint 3 is damaged'):
        CheckpointManager(directory, read_only=True).restore(ABSTRACT, step=3)
    with CheckpointManager(directory, keep=2) as manager:
        restored = manager.restore(ABSTRACT)
        assert restored.step == 2 and restored.state['step'] == 2
        (skipped,) = restored.skipped
        assert skipped.startswith('checkpoint 3 is damaged') and reason in skipped and skipped in caplog.text
        assert (directory / '3.damaged').is_dir()
        # It is counted no more, so it cannot push out an intact one.
        manager.save(4, state_of(4), {})
        manager.wait()
        assert manager.steps() == [2, 4]


def test_a_checkpoint_without_manifest_is_not_counted(intact, tmp_path, caplog):
    directory = tmp_path / 'checkpoints'
    shutil.copytree(intact, directory)
    (directory / '3' / 'manifest.json').unlink()
    assert CheckpointManager(directory, read_only=True).latest_step() == 2
    assert (directory / '3').exists()
    with CheckpointManager(directory) as manager:
        assert manager.restore(ABSTRACT).step == 2
    assert 'removing checkpoint 3 ' in caplog.text and not (directory / '3').exists()


def test_all_damaged_is_refused_with_every_reason(intact, tmp_path):
    directory = tmp_path / 'checkpoints'
    shutil.copytree(intact, directory)
    for step in (1, 2, 3):
        flip(directory / str(step) / 'arrays/params.a/0.0')
    for _ in range(2):  # The second start must not find an empty directory and begin anew.
        with CheckpointManager(directory) as manager, pytest.raises(UserError) as error:
            manager.restore(ABSTRACT)
        assert str(error.value).count('was altered') == 3 and manager.latest_step() == 3


def test_damage_to_the_optimizer_does_not_keep_parameters_from_being_read(intact, tmp_path):
    directory = tmp_path / 'checkpoints'
    shutil.copytree(intact, directory)
    flip(directory / '3' / 'arrays/step/0')
    np.testing.assert_array_equal(restore_params(directory, step=3)['b'], np.full(3, 3))


def test_two_runs_in_one_directory_are_refused(tmp_path):
    with CheckpointManager(tmp_path / 'checkpoints'):
        writer = start(tmp_path / 'checkpoints', 'any')
        _, errors = writer.communicate(timeout=60)
    assert writer.returncode == 1
    assert f'is being written by another run (process {os.getpid()} on ' in errors.splitlines()[-1]


def test_a_save_which_cannot_be_written_is_reported_and_costs_nothing(tmp_path):
    writer = start(tmp_path, 'full disk')
    _, errors = writer.communicate(timeout=60)
    assert writer.returncode == 1
    (line,) = [line for line in errors.splitlines() if 'UserError: checkpoint 2 could not be written to' in line]
    assert 'File too large' in line and line.endswith('; earlier ones are intact')
    assert [child.name for child in tmp_path.iterdir() if child.name.isdecimal()] == ['1']
