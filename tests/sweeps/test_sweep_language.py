"""Sweeps are lists of named overrides: their algebra is that of itertools, and nothing is changed twice or unknown."""

import itertools

import pytest
from sweep_parts import change, sweep_of, tiny_base

from transformer_jax.config import RopeScaling
from transformer_jax.errors import UserError
from transformer_jax.sweeps import Sweep, axis, chain, overlay, plan, product, variants, zip_equal
from transformer_jax.sweeps.cost import Cost, costs, fairness
from transformer_jax.sweeps.plan import check_workdir, choose_runs, describe, read_sweep, write_sweep
from transformer_jax.training.config import Experiment

HEADS, RATES, LAYERS = (1, 2, 4), (0.1, 0.3), (1, 2, 3)


def overrides(points):
    return [dict(point.overrides) for point in points]


def test_a_product_is_that_of_itertools_in_its_order():
    found = product(
        axis('model.num_heads', HEADS), axis('optimizer.learning_rate', RATES), axis('model.num_layers', LAYERS)
    )
    expected = [
        {'model.num_heads': h, 'optimizer.learning_rate': r, 'model.num_layers': n}
        for h, r, n in itertools.product(HEADS, RATES, LAYERS)
    ]
    assert overrides(found) == expected
    assert found[1].name == 'num_heads=1, learning_rate=0.1, num_layers=2'
    assert len({point.name for point in found}) == len(found)


def test_a_zip_is_that_of_python_and_a_chain_that_of_itertools():
    heads, layers = axis('model.num_heads', HEADS), axis('model.num_layers', LAYERS)
    expected = [{'model.num_heads': h, 'model.num_layers': n} for h, n in zip(HEADS, LAYERS, strict=True)]
    assert overrides(zip_equal(heads, layers)) == expected
    assert overrides(chain(heads, layers)) == list(itertools.chain(overrides(heads), overrides(layers)))


def test_the_operations_compose():
    found = chain(variants({'base': {}}), product(zip_equal(axis('model.num_heads', HEADS), axis('model.d_k', HEADS)),
                                                  axis('model.dropout', (0.0, 0.5))))  # fmt: skip
    assert len(found) == 1 + 3 * 2 and found[0].overrides == {}
    assert found[-1].overrides == {'model.num_heads': 4, 'model.d_k': 4, 'model.dropout': 0.5}


def test_lists_of_unequal_length_are_not_zipped():
    with pytest.raises(UserError, match='these have 3, 2 points'):
        zip_equal(axis('model.num_heads', HEADS), axis('optimizer.learning_rate', RATES))


@pytest.mark.parametrize('join', [product, zip_equal])
def test_a_field_which_another_list_shadows_is_refused(join):
    with pytest.raises(UserError, match='model.num_heads is changed twice, to 1 and to 1'):
        join(axis('model.num_heads', HEADS), axis('model.num_heads', HEADS))
    group = variants({'yarn': {'model.rope_scaling': {'kind': 'yarn'}}})
    with pytest.raises(UserError, match='one lies within the other'):
        join(group, axis('model.rope_scaling.factor', (2.0,)))


def test_an_overlay_is_the_experiment_built_by_hand():
    base = Experiment()
    found = overlay(base, {'model.num_heads': 4, 'optimizer.learning_rate': 2, 'training.seed': 7})
    by_hand = change(change(change(base, 'model', num_heads=4), 'optimizer', learning_rate=2.0), 'training', seed=7)
    assert found == by_hand and found != base


def test_none_can_be_given_a_value_and_a_value_be_made_none():
    base = overlay(Experiment(), {'model.position': 'rope'})
    assert base.model.num_kv_heads is None and base.model.rope_scaling is None
    changed = overlay(base, {'model.num_kv_heads': 2, 'model.rope_scaling': {'kind': 'linear', 'factor': 2.0}})
    assert changed.model.num_kv_heads == 2 and changed.model.rope_scaling == RopeScaling('linear', 2.0)
    deeper = overlay(changed, {'model.rope_scaling.factor': 4.0})
    assert deeper.model.rope_scaling == RopeScaling('linear', 4.0)
    assert overlay(changed, {'model.num_kv_heads': None, 'model.rope_scaling': None}) == base


def test_the_models_vocabulary_follows_that_of_the_data():
    assert overlay(Experiment(), {'data.vocab_size': 99}).model.vocab_size == 99


@pytest.mark.parametrize(
    'path,value,message',
    [
        ('model.num_head', 4, "config.model.num_head is unknown; did you mean 'num_heads'"),
        ('modle.num_heads', 4, "config.modle is unknown; did you mean 'model'"),
        ('model.num_heads', None, 'config.model.num_heads = None must be int'),
        ('training.steps', None, 'config.training.steps = None must be int'),
        ('model.rope_scaling.factor', 2.0, 'config.model.rope_scaling is None; override the whole group'),
        ('model.num_heads.more', 2, 'config.model.num_heads is 8, not a group'),
        ('model.num_heads', 5, 'does not divide model.d_model'),
        ('model.position', 'rop', "did you mean 'rope'"),
    ],
)
def test_an_overlay_which_does_not_fit_is_refused_by_name(path, value, message):
    with pytest.raises(UserError, match=message):
        overlay(Experiment(), {path: value})


@pytest.mark.parametrize(
    'fields,message',
    [
        ({'points': ()}, "sweep 'arms' has no runs"),
        ({'points': product(axis('model.num_heads', ()), axis('model.dropout', (0.1,)))}, 'has no runs'),
        ({'points': variants({'a': {}}) + variants({'a': {'model.num_heads': 1}})}, "variant 'a' 2 times"),
        ({'baseline': 'aa'}, "did you mean 'a'"),
        ({'seeds': (1,)}, 'an interval needs at least 2 seeds'),
        ({'seeds': (1, 2, 1)}, 'has a seed twice'),
        ({'heat_map': ('model.dropout', 'model.num_heads')}, "'model.num_heads' is unknown"),
    ],
)
def test_a_sweep_which_compares_nothing_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        sweep_of('a', 'b', **fields)


@pytest.mark.parametrize(
    'named,message',
    [
        ({'a': {'training.seed': 1}, 'b': {}}, 'give the sweep seeds'),
        ({'a': {}, 'b': {'model.dropout': 0.1}}, "variants 'a' and 'b' have the same config"),
        ({'a b': {}, 'a:b': {'model.dropout': 0.2}}, "'a b' and 'a:b' would share a directory"),
        ({'a': {'data.valid': 'none'}, 'b': {}}, 'judged on validation data'),
    ],
)
def test_a_plan_whose_arms_cannot_be_told_apart_is_refused(tmp_path, named, message):
    sweep = Sweep(name='arms', title='', points=variants(named), baseline=next(iter(named)))
    with pytest.raises(UserError, match=message):
        plan(sweep, tiny_base(tmp_path), tmp_path)


def test_every_arm_is_planned_once_with_every_seed_and_differs_in_nothing_else(tmp_path):
    base = tiny_base(tmp_path)
    sweep = sweep_of('a', 'b', 'c', seeds=(4, 5))
    runs = plan(sweep, base, tmp_path)
    assert [(run.variant, run.seed) for run in runs] == [(v, s) for s in (4, 5) for v in 'abc']
    assert len({run.directory for run in runs}) == 6
    for run in runs:
        expected = change(change(base, 'training', seed=run.seed), 'model', dropout=0.01 * 'abc'.index(run.variant))
        assert run.experiment.to_dict() | {'name': ''} == expected.to_dict() | {'name': ''}


@pytest.mark.parametrize('shards', [1, 2, 4, 9])
def test_shards_share_out_all_runs(tmp_path, shards):
    runs = plan(sweep_of('a', 'b', 'c', seeds=(0, 1)), tiny_base(tmp_path), tmp_path)
    parts = [choose_runs(runs, None, f'{index}/{shards}') for index in range(shards)]
    assert sorted(run.index for part in parts for run in part) == list(range(6))
    assert [choose_runs(runs, index, None) for index in range(6)] == [[run] for run in runs]


@pytest.mark.parametrize('index,shard', [(6, None), (-1, None), (None, '2/2'), (None, '1'), (None, 'a/b'), (0, '0/2')])
def test_a_run_or_shard_which_does_not_exist_is_refused(tmp_path, index, shard):
    runs = plan(sweep_of('a', 'b', 'c', seeds=(0, 1)), tiny_base(tmp_path), tmp_path)
    with pytest.raises(UserError, match='--index|--shard'):
        choose_runs(runs, index, shard)


def test_a_directory_takes_more_seeds_of_its_sweep_and_nothing_else(tmp_path):
    base, workdir = tiny_base(tmp_path), tmp_path / 'sweep'

    def check(sweep, base=base):
        description = describe(sweep, base)
        check_workdir(workdir, description, plan(sweep, base, workdir))
        write_sweep(workdir, description, {point.name: Cost(1, 1, 1, 1) for point in sweep.points}, [])

    check(sweep_of('a', 'b', seeds=(0, 1)))
    check(sweep_of('a', 'b', seeds=(1, 5)))
    assert read_sweep(workdir)['seeds'] == [0, 1, 5]
    with pytest.raises(UserError, match="holds sweep 'arms', not 'others'"):
        check(sweep_of('a', 'b', name='others'))
    with pytest.raises(UserError, match='sweep.variants.c: only in this config'):
        check(sweep_of('a', 'b', 'c'))
    with pytest.raises(UserError, match='sweep.config.training.steps: 4 -> 5'):
        check(sweep_of('a', 'b'), change(base, 'training', steps=5))
    (workdir / 'config.json').write_text('{}')
    with pytest.raises(UserError, match='directory of a single run'):
        check(sweep_of('a', 'b'))


def test_costs_are_those_of_the_formula_and_unfair_arms_are_named(tmp_path):
    """Products of a token: 2 x 4 D^2 and 2 x 2 D F in the encoder, 2 x 8 D^2 and 2 x 2 D F in the decoder."""
    base = tiny_base(tmp_path)
    named = {'base': {}, 'heads': {'model.num_heads': 4}, 'wide': {'model.d_ff': 64},
             'short': {'training.steps': 2}, 'cut': {'data.limit': 31}}  # fmt: skip
    experiments = {name: overlay(base, changes) for name, changes in named.items()}
    found = costs(experiments)
    rows, T, D, F, V, steps = 8, 24, 16, 32, 290, 4
    layer = 8 * D * D + 4 * D * F + 4 * T * D
    decoder = 16 * D * D + 4 * D * F + 8 * T * D + 2 * D * V
    assert found['base'].flops == 3 * rows * T * (layer + decoder) * steps
    assert found['base'].slots == rows * 2 * T * steps
    weights = V * D + 12 * D * D + 2 * (2 * D * F + D + F) + 5 * 2 * D
    assert found['base'].parameters == found['heads'].parameters == weights
    assert found['heads'].flops == found['base'].flops and 2 * found['short'].flops == found['base'].flops
    order, budget, parameters, flops = fairness(found, experiments, 'base')
    assert order == 'Data order: not that of the baseline in short, cut.'
    assert budget.endswith('it differs in short.')
    share = 2 * 2 * D * 32 + 2 * 32
    assert parameters == f'Parameters: more than 1 % off the baseline: wide (+{share / weights:.1%}).'
    assert flops.startswith('FLOPs: more than 1 % off the baseline: wide (+') and 'heads' not in flops
    alike = fairness({n: found[n] for n in ('base', 'heads')}, {n: experiments[n] for n in ('base', 'heads')}, 'base')
    assert [line.split(':')[1].split(' ')[1] for line in alike] == ['the', 'the', 'within', 'within']
