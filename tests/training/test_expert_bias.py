"""Correction biases of experts: moved by the load of a batch, by no gradient and no weight decay."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import model_and_params, some_tokens, tiny
from toy_training import tiny_experiment

from transformer_jax.errors import UserError
from transformer_jax.models import unroll_params
from transformer_jax.ops.routing import bias_step
from transformer_jax.subconfigs import MixtureConfig
from transformer_jax.training.config import OptimizerConfig, TrainingConfig
from transformer_jax.training.loop import train
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.restore import load_run
from transformer_jax.training.state import new_state
from transformer_jax.training.step import make_train_step

MIXTURE = MixtureConfig(
    6, 2, d_ff=5, shared_experts=1, affinity='sigmoid', correction_bias=True, groups=3, groups_per_token=2,
    group_score='top_two', scale=2.5, dense_layers=1, balance_loss=0.01, z_loss=0.001,
)  # fmt: skip
DEEPSEEK = dict(
    kind='decoder', position='rope', norm='rms', norm_position='pre', ffn='gated_silu', ffn_bias=False,
    tie_embeddings='none', num_layers=3, mixture=MIXTURE,
)  # fmt: skip


def test_a_bias_goes_up_where_there_are_fewer_choices_than_the_mean_and_down_where_there_are_more():
    """Wang et al. 2024, algorithm 1, line 4: b_i + u sign(mean c - c_i)."""
    chosen = np.array([[4.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    expected = [[0.1 * np.sign(row.mean() - c) for c in row] for row in chosen]
    np.testing.assert_allclose(bias_step(jnp.asarray(chosen), 0.1), expected, rtol=1e-6)
    assert expected == [[-0.1, 0.1, 0.1], [0.0, 0.0, 0.0]]


def _batch():
    tokens = some_tokens(4, 6)
    mask = (np.arange(6) < np.array([[6], [3], [5], [1]])).astype(np.int32)
    return {
        'inputs': {'tokens': tokens, 'mask': mask}, 'labels': some_tokens(4, 6, seed=1),
        'weights': mask.astype(np.float32),
    }  # fmt: skip


def _stepped(model, params, steps=1, **fields):
    """Parameters after some steps on the same batch."""
    config = OptimizerConfig('adamw', 1e-3, 'constant', 0, weight_decay=0.5, clip_norm=0.1)
    training = TrainingConfig(**fields)
    schedule = make_schedule(config, model.config.d_model, 10)
    optimizer = make_optimizer(config, schedule)
    step = make_train_step(model, optimizer, schedule, training)
    state = new_state(jax.tree.map(jnp.asarray, params), optimizer)
    for _ in range(steps):
        state, metrics = step(state, _batch())
    return jax.device_get(state.params), jax.device_get(metrics)


def _biases(params, config):
    layers = unroll_params(params, config)['decoder']
    return {i: layers[f'layers_{i}']['ffn']['router']['bias'] for i in (1, 2)}


@pytest.mark.parametrize('stack, accumulate', [('unrolled', 1), ('scan', 2)])
def test_a_step_moves_each_layers_bias_by_the_choices_of_the_whole_batch_and_by_nothing_else(stack, accumulate):
    model, params = model_and_params(tiny(**DEEPSEEK | {'layer_stack': stack}))
    out = jax.jit(lambda p: model.apply({'params': p}, **_batch()['inputs']))(params)
    chosen = jax.device_get(out.expert_choices)['decoder']
    real = _batch()['inputs']['mask'].sum()
    assert chosen[0] is None and all(layer.sum() == 2 * real for layer in chosen[1:])
    assert not np.array_equal(chosen[1], chosen[2])
    before = _biases(params, model.config)
    moved, metrics = _stepped(model, params, expert_bias='balance', expert_bias_rate=0.125, accumulate=accumulate)
    for i, bias in _biases(moved, model.config).items():
        np.testing.assert_array_equal(bias, before[i] + np.float32(0.125) * np.sign(chosen[i].mean() - chosen[i]))
    fixed, _ = _stepped(model, params, accumulate=accumulate)
    for i, bias in _biases(fixed, model.config).items():
        np.testing.assert_array_equal(bias, before[i])
    assert {'balance', 'router_z'} <= metrics.keys()
    # Everything else moves as it does without.
    routers = {i: layer for i, layer in unroll_params(moved, model.config)['decoder'].items() if i != 'final_norm'}
    expected = unroll_params(fixed, model.config)['decoder']
    for name, layer in routers.items():
        np.testing.assert_allclose(layer['attention']['query']['kernel'],
                                   expected[name]['attention']['query']['kernel'], rtol=1e-6)  # fmt: skip


def test_an_expert_to_which_all_went_loses_them_to_the_others():
    model, params = model_and_params(tiny(**DEEPSEEK | {'layer_stack': 'unrolled'}))
    params = jax.tree.map(np.copy, params)
    for i in (1, 2):
        params['decoder'][f'layers_{i}']['ffn']['router']['bias'][:] = [3, 0, 0, 0, 0, 0]
    count = jax.jit(lambda p: model.apply({'params': p}, **_batch()['inputs']).expert_choices['decoder'][1:])

    def heaviest(params):
        return [float(layer.max() / layer.mean()) for layer in count(params)]

    evened, _ = _stepped(model, params, 40, expert_bias='balance', expert_bias_rate=0.1)
    # Each token chooses two of six experts, so one which all choose has three times the mean.
    assert heaviest(params) == [3.0, 3.0] and max(heaviest(evened)) <= 2.0


def _experiment(directory):
    directory.mkdir(exist_ok=True)
    (directory / 'texts.txt').write_text('\n\n'.join(f'print the file in cell {n} of the table' for n in range(40)))
    choices = {name: value for name, value in DEEPSEEK.items() if name != 'num_layers'}
    experiment = tiny_experiment(
        directory,
        model={**choices, 'layer_stack': 'unrolled', 'dropout': 0.0},
        data={'objective': 'causal_lm', 'train': f'text:{directory / "texts.txt"}#split', 'valid': 'none'},
        **{'steps': 4, 'expert_bias': 'balance', 'label_smoothing': 0.0},
    )
    return dataclasses.replace(experiment, model=experiment.model.replace(num_layers=2))


def test_a_run_logs_both_losses_of_its_experts_and_keeps_the_biases_it_moved(tmp_path):
    experiment = _experiment(tmp_path)
    train(experiment, tmp_path / 'run')
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    logged = [line for line in lines if 'train/loss' in line]
    assert len(logged) == 4
    for line in logged:
        # A balance loss of 0.01 times at least 1 - which even choices have -, and positive squares.
        assert line['train/balance'] > 0.009 and line['train/router_z'] > 0
    bias = load_run(tmp_path / 'run').params['decoder']['layers_1']['ffn']['router']['bias']
    steps = np.asarray(bias) / 1e-3
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
    assert np.abs(steps).max() in (2, 3, 4)


def test_balancing_what_has_no_biases_or_rounds_them_away_is_refused(tmp_path):
    experiment = _experiment(tmp_path)
    for changes, message in (
        ({'mixture': None}, 'needs model.mixture.correction_bias'),
        ({'param_dtype': 'bfloat16'}, "too small for model.param_dtype = 'bfloat16'"),
    ):
        with pytest.raises(UserError, match=message):
            train(dataclasses.replace(experiment, model=experiment.model.replace(**changes)), tmp_path / 'run')
    with pytest.raises(UserError, match="did you mean 'balance'"):
        TrainingConfig(expert_bias='balanse')
