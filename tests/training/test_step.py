"""The train step: accumulation, skipping, randomness, sharding and compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from toy_training import Toy, batch

from transformer_jax.sharding import MeshConfig, make_mesh, place_batch
from transformer_jax.training.compiled import AheadOfTime
from transformer_jax.training.config import OptimizerConfig, TrainingConfig
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.state import abstract_state, init_state, new_state, state_shardings, with_shardings
from transformer_jax.training.step import make_eval_step, make_gradient, make_train_step


def setup(model=None, optimizer=None, **fields):
    model = model or Toy()
    optimizer_config = optimizer or OptimizerConfig('adam', 0.01, 'constant', 0)
    config = TrainingConfig(**fields)
    schedule = make_schedule(optimizer_config, 8, config.steps)
    transform = make_optimizer(optimizer_config, schedule)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']
    state = new_state(params, transform, ema=config.ema_decay is not None)
    return make_train_step(model, transform, schedule, config), state


def assert_trees_equal(one, two):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(two))


def test_accumulated_gradient_is_the_pooled_one_for_unequal_counts():
    """Two micro-batches with 3 and 1 counted tokens and mean losses 2 and 6 give 3, not 4."""
    rows = batch(rows=8)
    rows['weights'][::4] = 0  # micro-batch 0 of 4 has nothing to count
    for model in (Toy(), Toy(with_aux=True)):
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']
        whole = jax.jit(make_gradient(model, TrainingConfig()))
        parts = jax.jit(make_gradient(model, TrainingConfig(accumulate=4)))
        key = jax.random.key(1)
        assert 'while' in parts.lower(params, rows, key).as_text()
        assert 'while' not in whole.lower(params, rows, key).as_text()
        total, weight, gradient, aux, _ = whole(params, rows, key)
        total4, weight4, gradient4, aux4, _ = parts(params, rows, key)
        assert list(aux) == (['balance'] if model.with_aux else [])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), aux, aux4)
        np.testing.assert_allclose([total, weight], [total4, weight4], rtol=1e-6)
        assert weight == rows['weights'].sum()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, gradient4)
        means = [whole(params, jax.tree.map(lambda x, i=i: x[i::4], rows), key)[2] for i in range(4)]
        naive = jax.tree.map(lambda *g: sum(g) / 4, *means)
        gaps = jax.tree.leaves(jax.tree.map(lambda a, b: np.max(np.abs(a - b)), naive, gradient))
        assert max(gaps) > 1e-4  # the mean of means is another number on this batch


def test_a_batch_without_counted_tokens_has_loss_zero_and_no_gradient():
    rows = batch()
    rows['weights'][:] = 0
    step, state = setup()
    _, metrics = step(state, rows)
    assert metrics['loss'] == 0 and metrics['gradient_norm'] == 0 and metrics['skipped'] == 0


def test_a_step_which_is_not_finite_changes_only_the_counters():
    model = Toy()
    step, state = setup(model, ema_decay=0.9)
    good, bad = batch(seed=1), batch(seed=2)
    bad['weights'][0, 0] = np.nan
    state, metrics = step(state, good)
    kept = jax.device_get(state)
    state, metrics = step(state, bad)
    assert not np.isfinite(metrics['loss'])
    for name in ('params', 'opt_state', 'ema'):
        assert_trees_equal(getattr(kept, name), getattr(state, name))
    assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (2, 1, 1)
    state, metrics = step(state, bad)
    assert int(metrics['skipped_in_row']) == 2
    state, metrics = step(state, good)
    assert (int(metrics['skipped_in_row']), int(metrics['skipped']), int(state.step)) == (0, 2, 4)


def test_the_rate_counts_updates_and_not_skipped_steps():
    config = OptimizerConfig('adam', 1.0, 'constant', 10)
    step, state = setup(optimizer=config)
    bad = batch()
    bad['weights'][0, 0] = np.nan
    rates = []
    for rows in (batch(), bad, batch(), batch()):
        state, metrics = step(state, rows)
        rates.append(float(metrics['rate']))
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.2, 0.3], rtol=1e-6)


def test_dropout_is_a_function_of_seed_and_step():
    rows = batch()
    one, other = [], []
    for losses, seed in ((one, 0), (other, 1)):
        step, state = setup(Toy(dropout=0.5), OptimizerConfig('adam', 1e-12, 'constant', 0), seed=seed)
        for _ in range(2):
            state, metrics = step(state, rows)
            losses.append(float(metrics['loss']))
    step, state = setup(Toy(dropout=0.5), OptimizerConfig('adam', 1e-12, 'constant', 0))
    state, metrics = step(state, rows)
    assert float(metrics['loss']) == one[0]
    assert abs(one[0] - one[1]) > 1e-4 and abs(one[0] - other[0]) > 1e-4


def test_moving_average_is_the_numpy_one():
    step, state = setup(ema_decay=0.5)
    average, rows = jax.device_get(state.params['output']['kernel']), batch()
    for n in range(1, 13):
        state, _ = step(state, rows)
        decay = min(0.5, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * np.asarray(state.params['output']['kernel'])
    np.testing.assert_allclose(state.ema['output']['kernel'], average, rtol=1e-5)


def test_only_shapes_compiled_ahead_run():
    step, state = setup()
    ahead = AheadOfTime('step', step, keyed_by=1)
    report = ahead.compile(state, batch(length=6))
    state, _ = ahead(state, batch(length=6))
    state, _ = ahead(state, batch(length=6, seed=3))
    assert ahead.compilations == 1 and report.seconds > 0 and report.argument_bytes > 0
    with pytest.raises(RuntimeError, match='was not compiled for 8x7; compiled: 8x6'):
        ahead(state, batch(length=7))


def test_evaluation_sums_over_batches_of_any_size():
    model = Toy()
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']
    rows, step = batch(rows=10), make_eval_step(model)
    whole = step(params, rows)
    parts = [step(params, jax.tree.map(lambda x, a=a, b=b: x[a:b], rows)) for a, b in ((0, 4), (4, 8), (8, 10))]
    for name in ('loss', 'accuracy'):
        np.testing.assert_allclose(np.sum([part[name] for part in parts], axis=0), whole[name], rtol=1e-5)


def init(key):
    return Toy().init(key, jnp.zeros((1, 2), jnp.int32))['params']


def test_eight_devices_equal_one():
    """Rows and one parameter spread over eight devices, accumulation on, one device without any counted token."""
    mesh = make_mesh(MeshConfig())
    assert mesh.shape['data'] == 8
    rows = batch(rows=16)
    rows['weights'][:2] = 0
    optimizer_config = OptimizerConfig('adam', 0.01, 'constant', 0)
    schedule = make_schedule(optimizer_config, 8, 10)
    optimizer = make_optimizer(optimizer_config, schedule)
    abstract = abstract_state(jax.eval_shape(init, jax.random.key(0)), optimizer)
    replicated, columns = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, 'data'))
    params = jax.tree.map(lambda _: replicated, abstract.params)
    params['embedding']['embedding'] = columns
    shardings = state_shardings(abstract, params, replicated)
    assert shardings.opt_state[0].mu['embedding']['embedding'] == columns
    state = init_state(init, optimizer, jax.random.key(0), shardings=shardings)
    step = make_train_step(Toy(), optimizer, schedule, TrainingConfig(accumulate=2), shardings)
    spread = place_batch(rows, mesh)
    program = step.lower(with_shardings(abstract, shardings), spread).compile()
    assert 'all-reduce' in program.as_text()
    alone_step, alone = setup(accumulate=2)
    for _ in range(3):
        state, metrics = program(state, spread)
        alone, alone_metrics = alone_step(alone, rows)
        np.testing.assert_allclose(metrics['loss'], alone_metrics['loss'], rtol=1e-5)
        np.testing.assert_allclose(metrics['gradient_norm'], alone_metrics['gradient_norm'], rtol=1e-4)
    assert state.params['embedding']['embedding'].sharding.spec == PartitionSpec(None, 'data')


def test_state_is_built_without_computing():
    optimizer = make_optimizer(OptimizerConfig(), make_schedule(OptimizerConfig(), 8, 10))
    abstract = abstract_state(jax.eval_shape(init, jax.random.key(0)), optimizer, ema=True)
    real = init_state(init, optimizer, jax.random.key(0), ema=True)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), real)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = state_shardings(abstract, jax.tree.map(lambda _: device, abstract.params), device)
    assert all(leaf.sharding == device for leaf in jax.tree.leaves(with_shardings(abstract, shardings)))


def test_runs_of_other_seeds_share_one_program_and_draw_the_noise_of_their_own():
    step, state = setup(Toy(dropout=0.5), seed=3)
    other, _ = setup(Toy(dropout=0.5), seed=2**33 - 5)
    rows = batch()
    shared = step.lower(state, rows, np.int32(0)).compile()
    seeds = np.array([3, 2**33 - 5, 4]).astype(np.int32)
    drawn = [shared(jax.tree.map(jnp.copy, state), rows, seed) for seed in seeds]
    own = [step(jax.tree.map(jnp.copy, state), rows), other(state, rows)]
    for one, two in zip(drawn, own, strict=False):
        assert_trees_equal(one, two)
    assert len({float(metrics['loss']) for _, metrics in drawn}) == 3
