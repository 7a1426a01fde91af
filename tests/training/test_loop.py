"""Whole runs: resumed equals straight, stops save first, other configs are refused, divergence is told in words."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from toy_training import change, tiny_experiment

import transformer_jax
from transformer_jax.checkpoints.restore import list_arrays, restore_params
from transformer_jax.errors import UserError
from transformer_jax.training.config import OptimizerConfig
from transformer_jax.training.loop import NotFinite, train
from transformer_jax.training.metrics import read_lines
from transformer_jax.training.optimizer import make_schedule
from transformer_jax.training.run_directory import RunDirectory


@pytest.fixture(scope='module', autouse=True)
def programs(tmp_path_factory):
    """Quick compilation, and a cache: all sittings of a run share one train step."""
    directory = str(tmp_path_factory.mktemp('programs'))
    jax.config.update('jax_compilation_cache_dir', directory)
    jax.config.update('jax_disable_most_optimizations', True)
    compilation_cache.reset_cache()
    yield directory
    jax.config.update('jax_compilation_cache_dir', None)
    jax.config.update('jax_disable_most_optimizations', False)
    compilation_cache.reset_cache()


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    """A run of 6 steps in one sitting, with dropout, accumulation and a moving average."""
    directory = tmp_path_factory.mktemp('straight')
    experiment = tiny_experiment(directory, accumulate=2, ema_decay=0.9)
    result = train(experiment, directory / 'run')
    return experiment, directory / 'run', result


def logged(workdir, *names):
    lines = read_lines(workdir / 'metrics.jsonl')
    return [tuple(line[name] for name in ('step', *names)) for line in lines if 'train/loss' in line]


def assert_same_run(one, other):
    """The same bits in parameters and averages, and the same numbers in the log."""
    for ema in (False, True):
        trees = [restore_params(path, 6, ema=ema) for path in (one, other)]
        jax.tree.map(np.testing.assert_array_equal, *trees)
    names = ('train/loss', 'train/rate', 'train/gradient_norm')
    assert logged(one, *names) == logged(other, *names)


def test_a_run_stopped_by_sigterm_saves_first_and_then_ends_with_the_same_bits(straight, tmp_path):
    experiment, reference, _ = straight

    def stop_at_3(step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    first = train(experiment, tmp_path / 'run', stop_at_3)
    assert first['interrupted'] and 3 <= first['step'] < 6
    saved = json.loads((tmp_path / 'run' / 'checkpoints' / str(first['step']) / 'manifest.json').read_text())
    assert saved['metadata']['data'] == {'seed': 0, 'step': first['step']}
    assert not (tmp_path / 'run' / 'result.json').exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    second = train(experiment, tmp_path / 'run')
    assert second['step'] == 6
    assert_same_run(reference, tmp_path / 'run')


def test_rates_of_a_resumed_log_are_those_of_the_schedule(straight):
    experiment, reference, _ = straight
    rate = make_schedule(experiment.optimizer, experiment.model.d_model, experiment.training.steps)
    wanted = [(n, pytest.approx(float(rate(n)), rel=1e-6)) for n in range(1, 7)]
    assert logged(reference, 'train/rate') == wanted


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from toy_training import tiny_experiment
from transformer_jax.training.loop import train
train(tiny_experiment(Path(sys.argv[2]), accumulate=2, ema_decay=0.9), sys.argv[3],
      lambda step, values: step < 5 or __import__('time').sleep(600))
"""


@pytest.mark.faults
def test_a_run_killed_at_once_ends_with_the_same_bits(straight, programs, tmp_path):
    experiment, reference, _ = straight
    data = Path(experiment.data.train).parent
    program = [sys.executable, '-c', KILLED, str(Path(__file__).parent), str(data), str(tmp_path / 'run')]
    settings = {
        'PYTHONPATH': str(Path(__file__).parents[2]),
        'JAX_NUM_CPU_DEVICES': str(jax.device_count()),
        'JAX_COMPILATION_CACHE_DIR': programs,
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    }
    process = subprocess.Popen(program, env={**os.environ, **settings}, start_new_session=True)
    deadline = time.monotonic() + 400
    while not any(step >= 5 for (step,) in logged(tmp_path / 'run')):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert not (tmp_path / 'run' / 'result.json').exists()
    train(experiment, tmp_path / 'run')
    assert_same_run(reference, tmp_path / 'run')


def test_a_finished_run_is_not_trained_again(straight):
    experiment, reference, result = straight
    assert train(experiment, reference) == json.loads((reference / 'result.json').read_text())


def test_a_directory_of_another_config_is_refused_with_all_differences(straight):
    experiment, reference, _ = straight
    other = change(change(experiment, 'model', num_heads=4), 'optimizer', learning_rate=3.0)
    before = (reference / 'config.json').read_text()
    with pytest.raises(UserError) as caught:
        train(other, reference)
    message = str(caught.value)
    assert 'config.model.num_heads: 2 -> 4' in message and 'config.optimizer.learning_rate: 1.0 -> 3.0' in message
    assert '\n' not in message and message.count('->') == 2
    assert (reference / 'config.json').read_text() == before


def test_a_checkpoint_of_another_config_is_refused_though_config_json_is_lost(straight, tmp_path):
    experiment, reference, _ = straight
    shutil.copytree(reference, tmp_path / 'run')
    for name in ('config.json', 'result.json'):
        (tmp_path / 'run' / name).unlink()
    with pytest.raises(UserError, match='config.optimizer.learning_rate: 1.0 -> 3.0'):
        train(change(experiment, 'optimizer', learning_rate=3.0), tmp_path / 'run')


def test_a_bucket_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="workdir 'gs://bucket/run' is a bucket"):
        train(tiny_experiment(tmp_path / 'data'), 'gs://bucket/run')
    assert [path.name for path in tmp_path.iterdir()] == ['data']


def test_a_schedule_which_depends_on_the_number_of_steps_cannot_be_prolonged(straight, tmp_path):
    experiment, reference, _ = straight
    RunDirectory(reference).check(change(experiment, 'training', steps=60, log_every=7, keep=9))
    with pytest.raises(UserError, match='config.training.steps: 6 -> 3'):
        RunDirectory(reference).check(change(experiment, 'training', steps=3))
    cosine = change(experiment, 'optimizer', schedule='cosine')
    directory = RunDirectory(tmp_path)
    directory.write_json('config.json', cosine.to_dict())
    with pytest.raises(UserError, match='config.training.steps: 6 -> 60'):
        directory.check(change(cosine, 'training', steps=60))


def test_divergence_stops_the_run_with_step_rate_and_batch(tmp_path):
    wild = OptimizerConfig(learning_rate=1e30, schedule='constant', warmup_steps=0)
    experiment = tiny_experiment(tmp_path, optimizer=wild, steps=50, nonfinite_limit=3)
    with pytest.raises(NotFinite, match=r'3 steps in a row; stopped at step 4, learning rate 1e\+30, batch of seed 0'):
        train(experiment, tmp_path / 'run')
    lines = read_lines(tmp_path / 'run' / 'metrics.jsonl')
    assert lines[-1]['train/skipped'] >= 1 and lines[-1]['train/loss'] is None


def test_checkpoints_hold_averages_counters_config_and_vocabulary(straight):
    experiment, reference, _ = straight
    names = list_arrays(reference, 6)
    assert {'step', 'skipped', 'skipped_in_row'} <= names.keys()
    assert {name.split('/')[0] for name in names} >= {'params', 'opt_state', 'ema'}
    saved = json.loads((reference / 'checkpoints' / '6' / 'manifest.json').read_text())['metadata']
    assert saved['experiment'] == experiment.to_dict()
    assert (reference / 'tokenizer.model').exists() and len(saved['tokenizer']) == 16


def test_a_restored_model_gives_the_logits_of_the_parameters_which_were_judged(straight):
    experiment, reference, result = straight
    model, params = transformer_jax.restore(reference)
    assert result['judged'] == 'moving average'
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, params, restore_params(reference, 6, ema=True))
    assert model.config.vocab_size == 290 and model.config.decode.eos_ids == (1,)
    tokens = np.ones((1, 3), np.int32)
    assert model.apply({'params': params}, source_tokens=tokens, target_tokens=tokens).logits.shape == (1, 3, 290)


@pytest.mark.parametrize(
    'group,fields,message',
    [
        ('model', {'vocab_size': 300}, 'model.vocab_size = 300, but the vocabulary has 290 ids'),
        ('training', {'accumulate': 3}, 'does not divide into training.accumulate = 3'),
        ('data', {'train': 'nowhere.tsv'}, "'nowhere.tsv' is not a file"),
        ('data', {'vocab_size': 100_000}, 'larger than the training text allows'),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(tmp_path, group, fields, message):
    experiment = change(tiny_experiment(tmp_path), group, **fields)
    with pytest.raises(UserError, match=message):
        train(experiment, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
