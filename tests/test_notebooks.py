"""Every notebook runs from top to bottom in a fresh kernel, and shows what it says it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.configs import smoke
from transformer_jax.training.config import Experiment
from transformer_jax.training.loop import train

NOTEBOOKS = Path(__file__).parent.parent / 'notebooks'

pytestmark = pytest.mark.notebooks


@pytest.fixture(scope='session')
def run_directory(tmp_path_factory):
    """The run which RUN_DIRECTORY names, else a new one of the smoke config."""
    if 'RUN_DIRECTORY' in os.environ:
        return os.environ['RUN_DIRECTORY']
    directory = tmp_path_factory.mktemp('runs') / 'smoke'
    train(Experiment.from_dict(smoke.get_config().to_dict()), directory)
    return str(directory)


@pytest.fixture(scope='session')
def sweep_directory(tmp_path_factory):
    """A sweep with runs of a few steps."""
    directory = tmp_path_factory.mktemp('sweeps') / 'warmup'
    command = [sys.executable, '-m', 'experiments.ablate', '--sweep=warmup', f'--workdir={directory}', '--seeds=0,1']
    short = ['training.steps=12', 'training.evaluate_every=4', 'data.limit=400', 'data.vocab_size=400']
    small = ['data.evaluation_limit=20', 'model.num_layers=1', 'model.d_model=16', 'model.d_ff=32']
    options = [f'--config.{option}' for option in short + small]
    subprocess.run([*command, *options], cwd=NOTEBOOKS.parent, check=True, capture_output=True)
    return str(directory)


@pytest.fixture
def execute(tmp_path):
    """Returns a function which runs a notebook and gives the texts and the kinds of what its cells show."""
    nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')

    def run(name):
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        nbclient.NotebookClient(notebook, timeout=600, resources={'metadata': {'path': str(tmp_path)}}).execute()
        outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
        kinds = [kind for output in outputs for kind in output.get('data', {})]
        pages = [output['data']['text/html'] for output in outputs if 'text/html' in output.get('data', {})]
        return [output.get('text', '') for output in outputs], kinds, pages

    return run


@pytest.mark.parametrize('path', sorted(NOTEBOOKS.glob('*.ipynb')), ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs(path):
    nbformat = pytest.importorskip('nbformat')
    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.get('outputs') or cell.get('execution_count') for cell in cells)


def test_restore_shows_the_run_its_translations_and_attention_and_trains_on(run_directory, execute, monkeypatch):
    monkeypatch.setenv('RUN_DIRECTORY', run_directory)
    texts, kinds, pages = execute('restore.ipynb')
    assert any('params/embedding/embedding' in text for text in texts)
    assert any(text.startswith('Opens the file.\n') and text.count('\n') == 15 for text in texts)
    assert kinds.count('image/png') == 3
    (page,) = pages
    assert page.startswith('<!doctype html>') and 'layer 2, head 4' in page
    assert any('at step 130 validation loss' in text for text in texts)


def test_decoding_finds_the_same_answer_by_hand(run_directory, execute, monkeypatch):
    monkeypatch.setenv('RUN_DIRECTORY', run_directory)
    texts, *_ = execute('decoding.ipynb')
    assert any('the same tokens as generate' in text for text in texts)


def test_a_sweep_is_read_into_a_table_and_drawn_anew(sweep_directory, execute, monkeypatch):
    monkeypatch.setenv('SWEEP_DIRECTORY', sweep_directory)
    texts, kinds, pages = execute('ablate.ipynb')
    assert any('pandas and the library agree on 4 arms' in text for text in texts)
    assert kinds.count('image/png') == 4 and len(pages) == 2  # curves, bars, heat map, the figure; two frames
    assert any('norm_position=post, warmup_steps=100' in page for page in pages)


def test_the_paper_s_equations_give_the_numbers_of_the_library(execute):
    texts, kinds, _ = execute('transformer_from_the_paper.ipynb')
    assert sum(text.count('largest difference') for text in texts) == 10
    assert kinds.count('image/png') == 3


def test_a_checkpoint_of_hugging_face_is_compared_tuned_and_exported(execute, monkeypatch):
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    monkeypatch.delenv('HF_FOLDER', raising=False)
    texts, *_ = execute('huggingface.ipynb')
    assert any('nats a byte' in text for text in texts) and any('model.safetensors' in text for text in texts)
