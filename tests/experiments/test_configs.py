"""Configs are experiments, every field of which a flag can change; mistakes are told by name."""

import importlib
import io
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from experiments import common
from experiments.screen import TrainingScreen, duration, quantity
from transformer_jax.errors import UserError
from transformer_jax.training.config import Experiment

CONFIGS = sorted(path.stem for path in Path(common.DEFAULT_CONFIG).parent.glob('[a-z]*.py'))


def parse(monkeypatch, *overrides):
    """Returns the experiment of a command line, with flags of its own."""
    arguments = ['program', f'--config={common.DEFAULT_CONFIG}', *overrides]
    values = flags.FlagValues()
    define = config_flags.DEFINE_config_file
    monkeypatch.setattr(sys, 'argv', arguments)
    monkeypatch.setattr(flags, 'FLAGS', values)
    monkeypatch.setattr(config_flags, 'DEFINE_config_file', lambda *given: define(*given, flag_values=values))
    common.define_config()
    values(sys.argv)
    return common.experiment()


@pytest.mark.parametrize('name', CONFIGS)
def test_each_config_is_a_valid_experiment_of_its_own_name(name):
    config = importlib.import_module(f'experiments.configs.{name}').get_config()
    experiment = Experiment.from_dict(config.to_dict())
    assert experiment.name == name
    assert experiment.model.vocab_size == experiment.data.vocab_size
    assert experiment.decode.beam_size > 1 or experiment.data.objective != 'translation'


def test_overrides_change_numbers_tuples_and_fields_which_are_none(monkeypatch):
    experiment = parse(
        monkeypatch,
        '--config.model.num_heads=4',
        '--config.model.num_kv_heads=2',
        '--config.optimizer.clip_norm=None',
        '--config.training.ema_decay=0.5',
        '--config.data.bucket_boundaries=(8,24)',
        '--config.model.norm_bias=false',
    )
    assert (experiment.model.num_heads, experiment.model.num_kv_heads) == (4, 2)
    assert experiment.optimizer.clip_norm is None and experiment.training.ema_decay == 0.5
    assert experiment.data.bucket_boundaries == (8, 24) and experiment.model.norm_bias is False


def test_the_models_vocabulary_follows_that_of_the_data(monkeypatch):
    experiment = parse(monkeypatch, '--config.data.vocab_size=1234')
    assert experiment.model.vocab_size == 1234


@pytest.mark.parametrize(
    'override,message',
    [
        ('--config.model.num_head=4', "config.model.num_head is unknown; did you mean 'num_heads'"),
        ('--config.modle.num_heads=4', "config.modle is unknown; did you mean 'model'"),
        ('--config.training.steps=None', 'config.training.steps = None must be int'),
        ('--config.model.norm_position=prae', "did you mean 'pre'"),
        ('--config.model.num_heads=5', 'model.num_heads = 5 does not divide model.d_model'),
    ],
)
def test_a_mistake_is_told_with_what_would_be_right(monkeypatch, override, message):
    with pytest.raises(UserError, match=message):
        parse(monkeypatch, override)


VALUES = {
    'loss': 2.5, 'rate': 1e-3, 'tokens_per_second': 12345.0, 'padding_share': 0.125, 'flops_per_second': 2.5e10,
    'seconds_per_step': 2.0,
}  # fmt: skip
LINE = 'step 10/40  loss 2.500  rate 1.00e-03  12.3k target tokens/s  padding 12%  25.0GFLOP/s  left 1:00'


def test_the_live_line_is_a_plain_line_where_there_is_no_terminal():
    stream = io.StringIO()
    screen = TrainingScreen(40, stream=stream)
    screen.report(10, VALUES)
    screen.message('saved')
    assert stream.getvalue() == f'{LINE}\nsaved\n'


def test_the_live_line_of_a_terminal_is_rewritten_in_place_and_cleared_for_messages(monkeypatch):
    monkeypatch.setenv('COLUMNS', '60')
    stream = io.StringIO()
    stream.isatty = lambda: True
    screen = TrainingScreen(40, stream=stream)
    screen.report(10, VALUES)
    screen.message('saved')
    assert stream.getvalue() == f'{LINE[:59]}\r{" " * 59}\rsaved\n'


def test_numbers_are_shown_as_people_read_them():
    assert [duration(s) for s in (5, 75, 4000)] == ['0:05', '1:15', '1:06:40']
    assert [quantity(v) for v in (12, 1200, 3.2e12)] == ['12.0', '1.2k', '3.2T']
