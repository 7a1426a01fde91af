"""A list of checkpoints agrees with what lies on the disk, and reads no array."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from transformer_jax.checkpoints import CheckpointManager, list_steps, storage
from transformer_jax.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')
    with CheckpointManager(folder / 'checkpoints', keep=None) as manager:
        for step, loss in ((5, 2.5), (10, 1.25), (15, None)):
            metrics = {} if loss is None else {'loss': loss}
            manager.save(
                step, {'params': {'w': jnp.zeros((3, 4)), 'b': jnp.zeros(2, jnp.bfloat16)}}, {'metrics': metrics}
            )
    return folder


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / 'run')
    return tmp_path / 'run'


def test_steps_are_listed_with_metrics_time_and_the_bytes_on_the_disk(saved, monkeypatch):
    monkeypatch.setattr(storage, 'read', None)
    listed = list_steps(saved)
    assert [(each.step, each.state, each.metrics) for each in listed] == [
        (5, 'whole', {'loss': 2.5}), (10, 'whole', {'loss': 1.25}), (15, 'whole', {}),
    ]  # fmt: skip
    for each in listed:
        folder = saved / 'checkpoints' / str(each.step)
        files = [path for path in (folder / 'arrays').rglob('*') if path.is_file()]
        assert each.bytes == sum(path.stat().st_size for path in files)
        assert each.saved_at == pytest.approx((folder / 'manifest.json').stat().st_mtime, abs=1)
    assert list_steps(saved / 'checkpoints' / '10') == list_steps(saved, 10) == listed[1:2]


def test_only_checksums_see_a_flipped_byte_and_sizes_see_a_short_file(run):
    checkpoints = run / 'checkpoints'
    flipped = checkpoints / '15/arrays/params.w/0.0'
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
    os.truncate(checkpoints / '10/arrays/params.w/0.0', 7)
    (checkpoints / '5').rename(checkpoints / '5.damaged')
    (checkpoints / '20/arrays').mkdir(parents=True)
    states = [(each.step, each.state) for each in list_steps(run)]
    assert states == [(5, 'set aside'), (10, 'damaged'), (15, 'whole'), (20, 'unfinished')]
    verified = list_steps(run, verify=True)
    assert [each.state for each in verified] == ['set aside', 'damaged', 'damaged', 'unfinished']
    assert 'params.w/0.0 has 7 bytes instead of 48' in verified[1].reason and 'was altered' in verified[2].reason
    assert verified[0].reason == 'lies in 5.damaged'


def test_what_is_not_there_is_said_in_one_line(run, tmp_path):
    with pytest.raises(UserError, match='there is no checkpoint 7 in .*; there are 5, 10, 15'):
        list_steps(run, 7)
    with pytest.raises(UserError, match='there is no checkpoint in .*; give a run directory'):
        list_steps(tmp_path)
    with pytest.raises(UserError, match='nowhere does not exist'):
        list_steps(tmp_path / 'nowhere')


def program(*arguments):
    command = [sys.executable, '-m', 'experiments.checkpoints', *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, 'JAX_PLATFORMS': 'cpu'}, capture_output=True, text=True)


def test_the_program_lists_steps_and_the_arrays_of_one(run):
    done = program(f'--workdir={run}', '--step=10', '--verify')
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1][0] == '10' and lines[1][-3:] == ['intact', 'loss', '1.25']
    assert ['params/w', '3×4', 'float32', '48'] in lines and ['params/b', '2', 'bfloat16', '4'] in lines
    assert lines[-1] == ['2', 'arrays', '52']


def test_the_program_ends_with_status_1_for_a_damaged_step_and_one_line_for_a_mistake(run):
    (run / 'checkpoints/10/arrays/params.w/0.0').unlink()
    done = program(f'--workdir={run}')
    assert done.returncode == 1 and 'damaged: arrays/params.w/0.0 is missing' in done.stdout and not done.stderr
    done = program(f'--workdir={run}/nowhere')
    assert done.returncode == 1 and done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
