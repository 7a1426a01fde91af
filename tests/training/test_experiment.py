"""An experiment survives JSON and refuses what it does not know."""

import json

import pytest
from toy_training import tiny_experiment

from transformer_jax.errors import UserError
from transformer_jax.training.config import Experiment, TrainingConfig, differences


def test_an_experiment_survives_json(tmp_path):
    experiment = tiny_experiment(tmp_path, ema_decay=0.5)
    assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment
    assert experiment != Experiment()


@pytest.mark.parametrize(
    'path,value,message',
    [
        ('training.step', 3, "config.training.step is unknown; did you mean 'steps'"),
        ('training.steps', 'ten', "config.training.steps = 'ten' must be int"),
        ('training.steps', None, 'config.training.steps = None must be int'),
        ('training.steps', True, 'config.training.steps = True must be int'),
        ('training.ema_decay', 2.0, 'must lie in'),
        ('optimzer', {}, "config.optimzer is unknown; did you mean 'optimizer'"),
        ('model.rope_scaling', {'kind': 'yarn', 'factr': 1.0}, "did you mean 'factor'"),
    ],
)
def test_a_wrong_name_or_type_is_refused_by_its_path(path, value, message):
    values = Experiment().to_dict()
    *groups, name = path.split('.')
    group = values
    for key in groups:
        group = group[key]
    group[name] = value
    with pytest.raises(UserError, match=message):
        Experiment.from_dict(values)


def test_whole_numbers_are_taken_where_fractions_are_meant():
    assert Experiment.from_dict({'optimizer': {'clip_norm': 1}}).optimizer.clip_norm == 1.0


def test_more_averaged_checkpoints_than_kept_ones_are_refused():
    with pytest.raises(UserError, match='training.keep is 5'):
        TrainingConfig(average_last=6)


def test_differences_name_each_leaf_once():
    old, new = {'a': {'b': 1, 'c': 2}, 'd': 3}, {'a': {'b': 1, 'c': 4}, 'e': 3}
    assert differences(old, new) == [
        'config.a.c: 2 -> 4',
        'config.d: only in the run directory (3)',
        'config.e: only in this config (3)',
    ]
