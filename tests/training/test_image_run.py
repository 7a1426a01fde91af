"""A run without words: trained, judged by accuracy, read back and continued."""

import dataclasses

import numpy as np
import pytest
from toy_training import tiny_experiment

from transformer_jax.data import sources
from transformer_jax.errors import UserError
from transformer_jax.subconfigs import PatchConfig
from transformer_jax.training import setup
from transformer_jax.training.config import OptimizerConfig
from transformer_jax.training.loop import train
from transformer_jax.training.restore import load_run

BRIGHT, DARK = 1.0, -1.0
VISION = {
    'kind': 'vision', 'patches': PatchConfig((4, 4), (2, 2), 1), 'head': 'classes', 'num_classes': 2, 'pooling': 'mean',
    'position': 'learned', 'embedding_scale': 'none', 'tie_embeddings': 'none', 'norm_position': 'pre',
    'layer_stack': 'unrolled', 'dropout': 0.0,
}  # fmt: skip


def _halves(config, split):
    """Images whose left half is bright (class 0) or dark (class 1), with noise."""
    random = np.random.default_rng(['train', 'valid', 'test'].index(split))
    rows = []
    for number in range(32):
        image = random.normal(size=(4, 4, 1)).astype(np.float32) * 0.3
        image[:, :2] += (BRIGHT, DARK)[number % 2]
        rows.append({'label': number % 2, 'image': image})
    return sources.ListSource(rows, f'halves:{split}', ('image',))


def _experiment(directory, **training):
    return tiny_experiment(
        directory,
        model=VISION,
        data={
            'objective': 'image_classification', 'train': 'sklearn:digits', 'valid': '', 'test': '',
            'batching': 'bucket', 'batch_tokens': 16, 'evaluation_rows': 16,
        },
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule='constant', warmup_steps=0),
        **{'steps': 12, 'evaluate_every': 4, 'checkpoint_every': 4, 'label_smoothing': 0.0,
           'best_metric': 'accuracy', **training},
    )  # fmt: skip


def test_images_are_learnt_and_a_stopped_run_ends_as_one_which_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, 'open_split', _halves)
    experiment = _experiment(tmp_path)
    result = train(experiment, tmp_path / 'run')
    assert set(result['test']) == {'loss', 'accuracy', 'examples', 'scores'}
    assert result['test']['accuracy'] == 1.0 and result['test']['examples'] == 32
    assert not (tmp_path / 'run' / 'tokenizer.model').exists()
    run = load_run(tmp_path / 'run')
    again = run.evaluator(run.decode).loss(run.params, _halves(None, 'test'))
    assert again == {name: result['test'][name] for name in again}
    # Constant rates do not depend on the number of steps, so a run of 4 may be continued to 12.
    short = dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, steps=4))
    train(short, tmp_path / 'two')
    assert train(experiment, tmp_path / 'two')['test'] == result['test']


def test_a_model_of_another_kind_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, 'open_split', _halves)
    experiment = _experiment(tmp_path)
    other = dataclasses.replace(experiment, model=experiment.model.replace(head='none', num_classes=None))
    with pytest.raises(UserError, match="'image_classification' needs model.head = 'classes', not 'none'"):
        train(other, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
