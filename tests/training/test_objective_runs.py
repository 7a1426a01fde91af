"""A run without references: trained, judged by its own metrics, and judged alike when it is read back."""

import dataclasses
import math

import numpy as np
import pytest
from toy_training import WORDS, tiny_experiment

from transformer_jax.data.sources import iterate, open_split
from transformer_jax.errors import UserError
from transformer_jax.training.loop import train
from transformer_jax.training.restore import load_run

STACK = {
    'head': 'lm',
    'tie_embeddings': 'output',
    'position': 'rope',
    'norm_position': 'pre',
    'layer_stack': 'unrolled',
}
def _experiment(directory, **training):
    directory.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    texts = [' '.join(random.choice(WORDS, random.integers(2, 8))) for _ in range(40)]
    (directory / 'texts.txt').write_text('\n\n'.join(texts))
    spec = f'text:{directory / "texts.txt"}#split'
    return tiny_experiment(
        directory,
        model={'kind': 'decoder', **STACK},
        data={'objective': 'causal_lm', 'train': spec, 'valid': '', 'test': ''},
        steps=2,
        evaluate_every=1,
        checkpoint_every=2,
        label_smoothing=0.0,
        **training,
    )


def test_a_run_ends_with_the_metrics_of_its_objective_and_they_come_back(tmp_path):
    experiment = _experiment(tmp_path)
    result = train(experiment, tmp_path / 'run')
    assert not (tmp_path / 'run' / 'samples.txt').exists() and (tmp_path / 'run' / 'plots' / 'curves.png').exists()
    run = load_run(tmp_path / 'run')
    source = open_split(experiment.data, 'test')
    again = run.evaluator(run.decode).loss(run.params, source)
    for name, value in again.items():
        assert result['test'][name] == pytest.approx(value, rel=1e-6)
    size = sum(len(example['text'].encode()) for example in iterate(source))
    assert again['bits_per_byte'] == pytest.approx(again['loss'] * again['tokens'] / math.log(2) / size)


def test_bleu_of_what_has_no_references_is_refused_before_anything_is_written(tmp_path):
    experiment = _experiment(tmp_path, bleu_every=1)
    with pytest.raises(UserError, match="bleu_every needs translations, which data.objective = 'causal_lm' has not"):
        train(experiment, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_model_of_another_kind_is_refused(tmp_path):
    experiment = _experiment(tmp_path)
    other = dataclasses.replace(experiment, model=experiment.model.replace(kind='encoder'))
    with pytest.raises(UserError, match="data.objective = 'causal_lm' needs model.kind = 'decoder', not 'encoder'"):
        train(other, tmp_path / 'run')
