"""Runs in several processes, and runs whose number of devices changes: the same data, the same parameters."""

import concurrent.futures
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from toy_training import tiny_experiment

from transformer_jax.checkpoints.restore import restore_params
from transformer_jax.errors import UserError
from transformer_jax.sharding import MeshConfig, distributed
from transformer_jax.training.config import OptimizerConfig
from transformer_jax.training.loop import train
from transformer_jax.training.metrics import read_lines

ROOT = Path(__file__).parents[2]
STEPS = 8
# An epsilon far above rounding, so that updates are as smooth in the gradient as the gradient itself.
OPTIMIZER = OptimizerConfig('adamw', 0.01, 'constant', 0, eps=1e-2)


def free_port():
    with socket.create_server(('localhost', 0)) as server:
        return server.getsockname()[1]


def environment(folder, devices):
    return {
        **os.environ,
        'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'tests' / 'training')]),
        'JAX_NUM_CPU_DEVICES': str(devices),
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'programs'),
    }


def describe(folder, name, mesh):
    experiment = tiny_experiment(folder, optimizer=OPTIMIZER, accumulate=2, steps=STEPS)
    experiment = dataclasses.replace(experiment, mesh=mesh)
    (folder / f'{name}.json').write_text(json.dumps(experiment.to_dict()))
    return experiment


def sitting(folder, name, processes, die_at=0):
    """Starts the processes of one sitting of a run on four devices and waits; returns what each printed.

    At step `die_at` process 0 is killed (kill -9), and the others then are.
    """
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name('one_of_several.py')), str(folder), name, str(index),
             str(processes), str(port), str(die_at)],
            env=environment(folder, 4 // processes), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    if die_at:
        assert started[0].wait(timeout=500) == -signal.SIGKILL
        for process in started:
            process.kill()
    outputs = [process.communicate(timeout=500) for process in started]
    if die_at:
        return []
    assert all(process.returncode == 0 for process in started), outputs[0][1][-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    """A straight run of one process with four devices; (folder, what it read)."""
    folder = tmp_path_factory.mktemp('runs')
    describe(folder, 'one', MeshConfig(data=1, fsdp=2, tensor=2))
    assert sitting(folder, 'one', 1) == [{'step': STEPS, 'devices': '4 cpu'}]
    return folder


def rows_read(folder, name, index):
    return json.loads((folder / f'{name}_{index}.rows.json').read_text())


def assert_same_parameters(folder, name):
    straight, other = (restore_params(folder / which, STEPS) for which in ('one', name))
    # Losses agree to 1e-6 of their size and updates are 0.01 at most, so parameters of size 1 do to a few 1e-7.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), straight, other)
    losses = [
        [line['train/loss'] for line in read_lines(folder / which / 'metrics.jsonl') if 'train/loss' in line]
        for which in ('one', name)
    ]
    assert len(losses[0]) == STEPS
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-6)


@pytest.mark.faults
def test_two_processes_read_disjoint_rows_are_killed_and_end_with_the_parameters_of_one(one):
    folder = one
    describe(folder, 'two', MeshConfig(data=1, fsdp=2, tensor=2))
    sitting(folder, 'two', 2, die_at=5)
    assert (folder / 'two' / 'checkpoints' / '2' / 'manifest.json').exists()
    assert not (folder / 'two' / 'result.json').exists()
    (whole, _), (first, shared), (second, also_shared) = (
        rows_read(folder, name, index) for name, index in (('one', 0), ('two', 0), ('two', 1))
    )
    assert jax.tree.map(lambda a, b: a + b, first, second, is_leaf=is_rows) == whole
    assert all(len(a['labels']) == len(b['labels']) and a != b for a, b in zip(first, second, strict=True))
    # Where a tensor axis runs over all processes, each of them reads all rows.
    assert shared == also_shared == [0, 1]
    assert sitting(folder, 'two', 2) == [{'step': STEPS, 'devices': '4 cpu'}] * 2
    assert_same_parameters(folder, 'two')


def is_rows(node):
    return isinstance(node, list) and isinstance(node[0], list)


@pytest.mark.faults
def test_a_run_begun_on_eight_devices_goes_on_with_four_and_the_same_data(one):
    folder = one
    experiment = describe(folder, 'elastic', MeshConfig())

    def stop_at_3(step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    assert jax.device_count() == 8
    first = train(experiment, folder / 'elastic', stop_at_3)
    assert first['interrupted'] and 3 <= first['step'] < STEPS
    assert sitting(folder, 'elastic', 1) == [{'step': STEPS, 'devices': '4 cpu'}]
    assert_same_parameters(folder, 'elastic')


def start(folder, *arguments):
    program = [sys.executable, '-m', 'experiments.train', f'--workdir={folder}/never', *arguments]
    return subprocess.Popen(
        program, cwd=ROOT, env=environment(folder, 1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_run_on_too_few_hosts_says_which_are_missing_and_ends(tmp_path):
    port = free_port()
    flags = [f'--coordinator=localhost:{port}', '--process_count=4', '--start_timeout=20']
    started = [start(tmp_path, *flags, f'--process_id={index}') for index in (0, 2)]
    for process in started:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 1
        assert errors == (
            'error: 2 of 4 processes called in; missing: process 1, 3; look whether their hosts run, or start fewer '
            f'(waited 20 s at localhost:{port})\n'
        )
    assert not (tmp_path / 'never').exists()


@pytest.mark.parametrize(
    'arguments, message',
    [
        ((None, 1, 2), '--process_id=1, --process_count=2 needs --coordinator too'),
        (('host', 0, 2), "--coordinator='host' is no address; give host:port"),
        (('host:1', 2, 2), '--process_id=2 is not one of --process_count=2; count from 0'),
    ],
)
def test_half_a_description_of_the_processes_is_refused(arguments, message):
    with pytest.raises(UserError) as error:
        distributed.start(*arguments)
    assert message in str(error.value)


def call_roll(*processes, timeout=20.0):
    """Runs the roll call of several processes in threads; returns the message of each, None where all was well."""
    coordinator = f'localhost:{free_port()}'

    def one(index, count):
        try:
            distributed.roll_call(distributed.Processes(coordinator, index, count), timeout)
        except UserError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        return [call.result() for call in [threads.submit(one, *process) for process in processes]]


def test_a_roll_call_finds_all_and_tells_two_of_one_number_and_unequal_counts():
    assert call_roll((2, 3), (0, 3), (1, 3)) == [None] * 3
    assert 'two processes call themselves process 1' in call_roll((0, 4), (1, 4), (1, 4))[0]
    assert call_roll((0, 3), (1, 2))[0].startswith('process 1 counts 2 processes and process 0 counts 3')
    assert call_roll((1, 2), timeout=0.5)[0].startswith('process 1 got no answer from process 0')


def test_slurm_names_the_processes_and_one_alone_is_no_run_of_several(monkeypatch):
    assert distributed._detected(1) is None
    for name, value in {
        'SLURM_JOB_ID': '77', 'SLURM_STEP_NODELIST': 'node[003-004]', 'SLURM_NTASKS': '2', 'SLURM_PROCID': '1',
        'SLURM_LOCALID': '0',
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    found = distributed._detected(1)
    assert (found.coordinator.split(':')[0], found.index, found.count) == ('node003', 1, 2)
    monkeypatch.setenv('SLURM_NTASKS', '1')
    monkeypatch.setenv('SLURM_PROCID', '0')
    assert distributed.start() is None
