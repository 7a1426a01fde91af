"""Runs of objectives without references: trained, judged by their own metrics, and judged alike when read back."""

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
RUNS = {
    'causal_lm': ({'kind': 'decoder', **STACK}, {}),
}


def _experiment(directory, objective, **training):
    model, data = RUNS[objective]
    directory.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    texts = [' '.join(random.choice(WORDS, random.integers(2, 8))) for _ in range(40)]
    text, labelled = directory / 'texts.txt', directory / 'labelled.tsv'
    text.write_text('\n\n'.join(texts))
    labelled.write_text(''.join(f'{int("file" in line)}\t{line}\n' for line in texts))
    spec = f'labelled:{labelled}#split' if objective == 'classification' else f'text:{text}#split'
    data = {'objective': objective, 'train': spec, 'valid': '', 'test': '', **data}
    return tiny_experiment(
        directory,
        model=model,
        data=data,
        steps=2,
        evaluate_every=1,
        checkpoint_every=2,
        label_smoothing=0.0,
        **training,
    )


@pytest.mark.parametrize('objective', sorted(RUNS))
def test_a_run_ends_with_the_metrics_of_its_objective_and_they_come_back(tmp_path, objective):
    experiment = _experiment(tmp_path, objective)
    result = train(experiment, tmp_path / 'run')
    assert not (tmp_path / 'run' / 'samples.txt').exists() and (tmp_path / 'run' / 'plots' / 'curves.png').exists()
    run = load_run(tmp_path / 'run')
    source = open_split(experiment.data, 'test')
    again = run.evaluator(run.decode).loss(run.params, source)
    for name, value in again.items():
        assert result['test'][name] == pytest.approx(value, rel=1e-6)
    if objective == 'classification':
        assert again['examples'] == len(source) and not {'bits_per_byte', 'perplexity'} & again.keys()
    else:
        size = sum(len(example['text'].encode()) for example in iterate(source))
        assert again['bits_per_byte'] == pytest.approx(again['loss'] * again['tokens'] / math.log(2) / size)


def test_bleu_of_what_has_no_references_is_refused_before_anything_is_written(tmp_path):
    experiment = _experiment(tmp_path, 'causal_lm', bleu_every=1)
    with pytest.raises(UserError, match="bleu_every needs translations, which data.objective = 'causal_lm' has not"):
        train(experiment, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_model_of_another_kind_is_refused(tmp_path):
    experiment = _experiment(tmp_path, 'causal_lm')
    other = dataclasses.replace(experiment, model=experiment.model.replace(kind='encoder'))
    with pytest.raises(UserError, match="data.objective = 'causal_lm' needs model.kind = 'decoder', not 'encoder'"):
        train(other, tmp_path / 'run')
