"""A sweep as a user runs it: interrupted, failing, told apart; and its live table."""

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import ablate, common
from experiments.configs import ablation
from experiments.sweep_screen import SweepScreen, run_table
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.sweeps import Sweep, axis, plan, runner
from transformer_jax.sweeps.cost import Cost
from transformer_jax.sweeps.pace import seconds_per_flop
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig
from transformer_jax.training.loop import NotFinite

ROOT = Path(__file__).parents[2]
SWEEPS = sorted(path.stem for path in ablate.SWEEPS.glob('[a-z]*.py'))


@pytest.mark.parametrize('name', SWEEPS)
def test_each_sweep_is_a_valid_one_of_its_own_name_on_its_config(name, tmp_path):
    base = Experiment.from_dict(ablation.get_config().to_dict())
    sweep = importlib.import_module(f'experiments.sweeps.{name}').get_sweep()
    runs = plan(sweep, base, tmp_path)
    assert sweep.name == name and len(sweep.seeds) >= 3
    assert len(runs) == len(sweep.points) * len(sweep.seeds) and not list(tmp_path.iterdir())


class Trainer:
    """Stands in for `train`: some runs fail, some diverge, one is stopped."""

    def __init__(self, monkeypatch, **fates):
        self.fates, self.trained = fates, []
        monkeypatch.setattr(runner, 'train', self)

    def __call__(self, experiment, workdir, report):
        run = f'{Path(workdir).parent.name[-1]}{experiment.training.seed}'
        self.trained.append(run)
        report(2, {'loss': 1.5})
        fate = self.fates.get(run)
        if fate == 'stop':
            return {'interrupted': True, 'step': 2}
        if fate is not None:
            raise fate
        result = {'step': 4, 'valid': {'loss': 1.0}}
        (Path(workdir) / 'result.json').write_text(json.dumps(result))
        return result


@pytest.fixture
def runs(tmp_path):
    base = Experiment(
        model=ModelConfig(d_model=16), data=DataConfig(), optimizer=OptimizerConfig(), decode=DecodeConfig(),
        training=TrainingConfig(steps=4),
    )  # fmt: skip
    sweep = Sweep(name='heads', title='', points=axis('model.num_heads', (1, 2)), baseline='num_heads=1', seeds=(0, 1))
    return plan(sweep, base, tmp_path)


def test_a_failed_run_is_told_and_tried_again_only_on_demand(monkeypatch, runs):
    trainer = Trainer(monkeypatch, **{'10': NotFinite('loss'), '20': OSError('disk\nfull')})
    assert runner.run_all(runs) and trainer.trained == ['10', '20', '11', '21']
    assert [runner.status(run.directory) for run in runs] == ['diverged', 'failed', 'finished', 'finished']
    assert runner.failure(runs[1].directory) == {'status': 'failed', 'step': 2, 'message': 'OSError: disk full'}
    assert runner.run_all(runs) and len(trainer.trained) == 4
    trainer.fates = {}
    assert runner.run_all(runs, retry=True) and trainer.trained[4:] == ['10', '20']
    assert {runner.status(run.directory) for run in runs} == {'finished'}


def test_a_stop_ends_the_sweep_and_the_next_call_goes_on(monkeypatch, runs):
    trainer = Trainer(monkeypatch, **{'20': 'stop'})
    assert not runner.run_all(runs) and trainer.trained == ['10', '20']
    trainer.fates = {}
    assert runner.run_all(runs) and trainer.trained[2:] == ['20', '11', '21']


def test_a_run_which_another_process_trains_is_left_to_it(monkeypatch, runs):
    trainer, heard = Trainer(monkeypatch), []
    runs[0].directory.mkdir(parents=True)
    code = (
        'import sys; from etils import epath; from transformer_jax.checkpoints.lock import acquire;'
        'acquire(epath.Path(sys.argv[1])); print("held", flush=True); sys.stdin.read()'
    )
    holder = subprocess.Popen(
        [sys.executable, '-c', code, str(runs[0].directory)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b'held\n'
    assert runner.run_all(runs, watch=lambda run, now, step, values: heard.append((run.index, now)))
    holder.communicate()
    assert trainer.trained == ['20', '11', '21'] and heard[0] == (0, 'busy')
    assert runner.run_all(runs) and trainer.trained[3:] == ['10']


def test_the_expected_time_is_that_of_finished_runs(monkeypatch, runs, tmp_path):
    cost = {'num_heads=1': Cost(10, 100, 50, 1000), 'num_heads=2': Cost(10, 100, 50, 3000)}
    for run, seconds in ((runs[0], 5.0), (runs[1], 15.0)):
        run.directory.mkdir(parents=True)
        (run.directory / 'result.json').write_text(json.dumps({'step': 4, 'seconds_trained': seconds}))
    pace, origin = seconds_per_flop(runs, cost)
    assert pace == 20.0 / 4000 and 'finished' in origin
    table = run_table(runs, cost, pace).splitlines()
    assert table[0].split() == ['run', 'variant', 'seed', 'parameters', 'FLOPs', 'FLOPs/token', 'time', 'status']
    assert table[3].split() == ['2', 'num_heads=1', '1', '10', '1.0k', '10.0', '0:05', 'new']
    assert table[-1] == '4 runs of 4 steps, 0:20 left to do'


def test_the_table_is_redrawn_in_place_on_a_terminal_and_told_in_lines_elsewhere(monkeypatch, runs):
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setenv('LINES', '40')
    clock = iter(range(100))
    monkeypatch.setattr('time.monotonic', lambda: float(next(clock)))
    cost = {run.variant: Cost(10, 100, 50, 1000) for run in runs}
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    for stream in (terminal, io.StringIO()):
        screen = SweepScreen(runs, cost, stream)
        for step in (0, 1, 3):
            screen.watch(runs[0], 'running', step, {'loss': 2.5} if step else {})
        screen.watch(runs[0], 'finished', 4, {'seconds': 9.0, 'loss': 2.0})
    drawn = terminal.getvalue().split('\x1b[6A\x1b[J')
    assert len(drawn) == 4 and all(len(frame.splitlines()) == 6 for frame in drawn)
    assert drawn[2].splitlines()[1].split() == ['0', 'num_heads=1', '0', 'running', '3/4', '2.500']
    assert drawn[3].splitlines()[-1].startswith('[1/4 ended, left 0:')
    lines = stream.getvalue().splitlines()
    assert lines[0] == 'run 0  num_heads=1, seed 0: running  step 0/4  loss -  [0/4 ended, left unknown]'
    assert len(lines) == 2 and lines[1].startswith('run 0  num_heads=1, seed 0: finished  step 4/4  loss 2.000')


@pytest.mark.parametrize(
    'name,seeds,overridden,message',
    [
        (None, None, [], '--sweep is missing; choose from heads'),
        ('head', None, [], "did you mean 'heads'"),
        ('heads', ['0', 'x'], [], "--seeds = '0,x' must be whole numbers"),
        ('heads', ['0'], [], 'an interval needs at least 2 seeds'),
        ('heads', None, ['model.num_heads'], '--config.model.num_heads would be overridden by sweep'),
    ],
)
def test_a_mistake_in_the_choice_of_a_sweep_is_told(monkeypatch, name, seeds, overridden, message):
    monkeypatch.setattr(common, 'overridden', overridden)
    with pytest.raises(UserError, match=message):
        ablate._sweep(name, seeds)


def test_a_sweep_run_in_two_shards_ends_in_its_report(tmp_path):
    tiny = [
        'training.steps=4', 'training.evaluate_every=2', 'data.limit=300', 'data.vocab_size=400',
        'data.evaluation_limit=8', 'model.num_layers=1', 'model.d_model=16', 'model.d_ff=16', 'decode.beam_size=1',
    ]  # fmt: skip
    command = [
        sys.executable, '-m', 'experiments.ablate', '--sweep=warmup', f'--workdir={tmp_path / "sweep"}', '--seeds=0,1',
        *(f'--config.{option}' for option in tiny),
    ]  # fmt: skip

    def ablate_with(*options):
        quick = {**os.environ, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
        done = subprocess.run([*command, *options], cwd=ROOT, env=quick, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert '4 of 8 runs of the sweep are left to others' in ablate_with('--shard=0/2')
    results = sorted((tmp_path / 'sweep').glob('*/*/result.json'))
    times = [path.stat().st_mtime_ns for path in results]
    docs = tmp_path / 'docs'
    docs.mkdir()
    told = ablate_with(f'--docs={docs}', '--machine=an abacus')
    assert [path.stat().st_mtime_ns for path in results] == times and len(results) == 4
    table = (tmp_path / 'sweep' / 'report' / 'table.csv').read_text().splitlines()
    assert len(table) == 5 and '2/2' in told and 'an abacus' in (docs / 'ablations.md').read_text()
    names = {path.name for path in (tmp_path / 'sweep' / 'report').iterdir()}
    assert {f'{name}.{kind}' for name in ('curves', 'bars', 'heat_map') for kind in ('png', 'pdf')} <= names
