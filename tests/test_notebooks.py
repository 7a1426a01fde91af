"""Every notebook runs from top to bottom in a fresh kernel."""

import os
from pathlib import Path

import pytest

from experiments.configs import smoke
from transformer_jax.training.config import Experiment
from transformer_jax.training.loop import train

NOTEBOOKS = Path(__file__).parent.parent / 'notebooks'

pytestmark = pytest.mark.notebooks


@pytest.fixture
def run_directory(tmp_path):
    """The run which RUN_DIRECTORY names, else a new one of the smoke config."""
    if 'RUN_DIRECTORY' in os.environ:
        return os.environ['RUN_DIRECTORY']
    train(Experiment.from_dict(smoke.get_config().to_dict()), tmp_path / 'smoke')
    return str(tmp_path / 'smoke')


def _shown(cells):
    for cell in cells:
        for output in cell.get('outputs', ()):
            yield output.get('text', '')
            yield from output.get('data', {})


def test_restore_shows_the_run_its_translations_and_two_pictures(run_directory, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
    monkeypatch.setenv('RUN_DIRECTORY', run_directory)
    notebook = nbformat.read(NOTEBOOKS / 'restore.ipynb', as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={'metadata': {'path': str(tmp_path)}}).execute()
    shown = list(_shown(notebook.cells))
    assert any('params/embedding/embedding' in text for text in shown)
    assert any(text.startswith('Opens the file.\n') and text.count('\n') == 15 for text in shown)
    assert shown.count('image/png') == 2
