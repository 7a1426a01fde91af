"""The three programs as a user runs them: in processes of their own, on files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = 'open close save print delete the a file page cell row table dialog of in'.split()
CONFIG = """
from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig

def get_config():
    return to_config_dict(Experiment(
        name='tiny',
        model=ModelConfig(vocab_size=290, d_model=16, d_ff=32, num_layers=1, num_heads=2),
        data=DataConfig(train='{folder}/train.tsv', valid='{folder}/valid.tsv', test='none', vocab_size=290,
                        source_length=24, target_length=24, batch_tokens=384, evaluation_rows=8),
        optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=4),
        training=TrainingConfig(steps=4, log_every=2, evaluate_every=2, checkpoint_every=2, average_last=2),
        decode=DecodeConfig(max_new_tokens=6, beam_size=2),
    ))
"""


def program(folder, *arguments, given=''):
    """Runs `python ...` from the project's directory; returns the finished process."""
    settings = {
        'PYTHONPATH': str(ROOT),
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'programs'),
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **settings}, input=given, capture_output=True,
        text=True, timeout=400,
    )  # fmt: skip


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with a trained run, and the training program's output."""
    folder = tmp_path_factory.mktemp('programs')
    rows = [[WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(2 + i % 5)] for i in range(40)]
    lines = [f'{" ".join(row)}\t{" ".join(row[::-1])}\n' for row in rows]
    (folder / 'train.tsv').write_text(''.join(lines[:32]))
    (folder / 'valid.tsv').write_text(''.join(lines[32:]))
    (folder / 'tiny.py').write_text(CONFIG.format(folder=folder))
    done = program(
        folder,
        'experiments/train.py',
        f'--config={folder}/tiny.py',
        f'--workdir={folder}/run',
        '--config.training.seed=1',
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def test_training_shows_progress_and_leaves_scores_samples_and_pictures(trained):
    folder, output = trained
    run = folder / 'run'
    assert 'step 2/4  loss' in output and 'target tokens/s' in output and 'left 0:0' in output
    assert 'compiled train step' in output and 'translation:' in output and 'BLEU' in output
    result = json.loads((run / 'result.json').read_text())
    assert (
        result['step'] == 4 and 0 <= result['valid']['bleu'] <= 100 and 'tok:13a' in result['valid']['bleu_signature']
    )
    assert (run / 'samples.txt').read_text().count('translation: ') == 8
    pictures = sorted(path.name for path in (run / 'plots').iterdir())
    assert pictures == ['attention_1.png', 'attention_2.png', 'attention_3.png', 'curves.png']
    assert all(path.read_bytes().startswith(b'\x89PNG') for path in (run / 'plots').iterdir())
    assert json.loads((run / 'config.json').read_text())['training']['seed'] == 1


def test_evaluation_of_the_run_agrees_with_its_own_result(trained):
    folder, _ = trained
    done = program(folder, '-m', 'experiments.evaluate', f'--workdir={folder}/run', '--split=valid')
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((folder / 'run' / 'result.json').read_text())['valid']
    assert f'loss {result["loss"]:.4f}' in done.stdout and f'chrF  {result["chrf"]:.2f}' in done.stdout
    assert result['bleu_signature'] in done.stdout and 'mean of the last checkpoints' in done.stdout


def test_generation_writes_one_line_for_each_line_in_order(trained):
    folder, _ = trained
    lines = ['open the file', '', 'close a page', 'x' * 500, 'open the file']
    done = program(
        folder, '-m', 'experiments.generate', f'--workdir={folder}/run', '--batch=2', '--num_return=2', '--scores',
        given='\n'.join(lines) + '\n',
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = done.stdout.split('\n')[:-1]
    assert len(answers) == 2 * len(lines)
    assert answers[2:4] == ['0.0000\t', '0.0000\t'] and answers[:2] == answers[8:]
    assert answers[:2] != answers[4:6] and all('\t' in answer for answer in answers)
    assert '1 of 5 lines are longer' in done.stderr and '5/5 sentences' in done.stderr


def test_a_draft_changes_no_line_and_lines_too_long_are_left_out_on_request(trained):
    folder, _ = trained
    given = '\n'.join(['open the file', '', 'close a page', 'x' * 500, 'print a row of the table'])
    command = ['-m', 'experiments.generate', f'--workdir={folder}/run', '--too_long=skip', '--weights=int8']
    plain = program(folder, *command, '--beam_size=1', given=given)
    drafted = program(folder, *command, '--beam_size=1', f'--draft={folder}/run', given=given)
    assert plain.returncode == 0 == drafted.returncode, plain.stderr[-3000:] + drafted.stderr[-3000:]
    assert drafted.stdout == plain.stdout and [bool(line) for line in plain.stdout.split('\n')[:-1]] == [1, 0, 1, 0, 1]
    assert '1 of 5 lines are longer than 24 tokens and have empty answers' in plain.stderr
    refused = program(folder, *command, f'--draft={folder}/run', given=given)
    assert refused.stderr.endswith('error: beam_size = 2 does not go with a draft model; set beam_size = 1\n')


def test_export_of_a_run_writes_programs_parameters_and_shapes(trained):
    folder, _ = trained
    command = ['-m', 'experiments.export', f'--workdir={folder}/run', f'--output={folder}/exported', '--weights=int4',
               '--group=4', '--platforms=cpu']  # fmt: skip
    done = program(folder, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.rsplit('/')[-1] for line in done.stdout.splitlines()] == [
        'params.npz', 'prefill.bin', 'shapes.json', 'step.bin'
    ]  # fmt: skip
    again = program(folder, *command)
    assert again.returncode == 1 and 'is not empty' in again.stderr


@pytest.mark.parametrize(
    'arguments,message',
    [
        (['experiments/train.py', '--config.model.num_head=4'], "did you mean 'num_heads'"),
        (['-m', 'experiments.evaluate', '--workdri=x'], 'Did you mean: workdir'),
        (['-m', 'experiments.generate', '--workdir=/nowhere'], 'is not there'),
    ],
)
def test_a_mistake_is_one_line_and_status_1(tmp_path, arguments, message):
    done = program(tmp_path, *arguments)
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1 and message in done.stderr


def test_the_traceback_is_shown_on_request(tmp_path):
    done = program(tmp_path, '-m', 'experiments.generate', '--workdir=/nowhere', '--debug')
    assert done.returncode == 1 and 'Traceback' in done.stderr and done.stderr.count('\n') > 5
