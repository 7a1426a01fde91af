"""Rates, Adam and weight decay as really applied to the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.training.config import OptimizerConfig
from transformer_jax.training.optimizer import decay_mask, make_optimizer, make_schedule


def numpy_adam(param, gradients, rate, b1, b2, eps, decay=0.0):
    param, m, v = np.array(param, np.float64), 0.0, 0.0
    for n, gradient in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        step = (m / (1 - b1**n)) / (np.sqrt(v / (1 - b2**n)) + eps)
        param = param - rate(n) * (step + decay * param)
    return param


def noam(n, width=512, warmup=4000):
    return width**-0.5 * min(n**-0.5, n * warmup**-1.5)


def run(config, param, gradients, axes=None):
    optimizer = make_optimizer(config, make_schedule(config, 512, 100), axes)
    params, state = param, optimizer.init(param)
    history = [params]
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        history.append(params)
    return history


@pytest.mark.parametrize('update,rate', [(1, 1.746928e-7), (2, 3.493856e-7), (2000, 3.493856e-4), (4000, 6.987712e-4),
                                         (16000, 3.493856e-4)])  # fmt: skip
def test_noam_rate_of_an_update(update, rate):
    assert make_schedule(OptimizerConfig(), 512, 10**5)(update) == pytest.approx(rate, rel=1e-5)


def test_first_updates_apply_the_papers_rates_to_the_parameters():
    """With a constant gradient Adam's step is the rate itself, so the parameter shows which rate was used."""
    history = run(OptimizerConfig(b2=0.98), {'w': jnp.zeros(1)}, [{'w': jnp.ones(1)}] * 3)
    moves = [float(a['w'][0] - b['w'][0]) for a, b in zip(history, history[1:], strict=False)]
    np.testing.assert_allclose(moves, [noam(1), noam(2), noam(3)], rtol=1e-4)


def test_adam_with_noam_equals_numpy():
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=5), [random.normal(size=5) for _ in range(20)]
    config = OptimizerConfig(learning_rate=200.0)
    ours = run(config, {'w': jnp.asarray(start)}, [{'w': jnp.asarray(g)} for g in gradients])[-1]['w']
    wanted = numpy_adam(start, gradients, lambda n: 200 * noam(n), 0.9, 0.98, 1e-9)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)
    assert np.max(np.abs(wanted - start)) > 1e-3


def test_adamw_equals_numpy():
    random = np.random.default_rng(1)
    start, gradients = random.normal(size=(2, 3)), [random.normal(size=(2, 3)) for _ in range(5)]
    config = OptimizerConfig('adamw', 0.01, 'constant', 0, weight_decay=0.1)
    ours = run(config, {'w': jnp.asarray(start)}, [{'w': jnp.asarray(g)} for g in gradients])[-1]['w']
    np.testing.assert_allclose(ours, numpy_adam(start, gradients, lambda n: 0.01, 0.9, 0.98, 1e-9, 0.1), rtol=1e-5)


def test_other_schedules_start_above_zero_peak_after_warm_up_and_end_where_told():
    for schedule, middle in (('cosine', 0.55), ('linear', 0.55), ('constant', 1.0)):
        rate = make_schedule(OptimizerConfig('adam', 1.0, schedule, 10, final_fraction=0.1), 512, 110)
        assert rate(1) == pytest.approx(0.1) and rate(10) == pytest.approx(1.0)
        assert rate(60) == pytest.approx(middle)
        assert rate(110) == pytest.approx(1.0 if schedule == 'constant' else 0.1)


def test_without_warm_up_the_first_rate_is_the_peak():
    assert make_schedule(OptimizerConfig('adam', 0.5, 'constant', 0), 512, 10)(1) == pytest.approx(0.5)


PARAMETERS = {
    'embedding': {'embedding': jnp.ones((7, 4))},
    'layers': {
        'norm': {'scale': jnp.ones((3, 4)), 'bias': jnp.ones((3, 4))},
        'attention': {'query': {'kernel': jnp.ones((3, 4, 2, 2)), 'bias': jnp.ones((3, 2, 2))}},
        'ffn': {'wi': {'kernel': jnp.ones((3, 4, 8)), 'bias': jnp.ones((3, 8))}},
    },
    'output_head': {'ln_f': {'weight': jnp.ones((4,))}, 'unusual': {'weight': jnp.ones((4,))}},
}
AXES = {
    'embedding': {'embedding': ('vocab', 'embed')},
    'layers': {
        'norm': {'scale': ('layers', 'embed'), 'bias': ('layers', 'embed')},
        'attention': {
            'query': {'kernel': ('layers', 'embed', 'heads', 'head_dim'), 'bias': ('layers', 'heads', 'head_dim')}
        },
        'ffn': {'wi': {'kernel': ('layers', 'embed', 'mlp'), 'bias': ('layers', 'mlp')}},
    },
    'output_head': {'ln_f': {'weight': ('embed',)}, 'unusual': {'weight': ('embed',)}},
}


def test_decay_moves_matrices_by_one_percent_and_neither_norms_nor_biases():
    config = OptimizerConfig('adamw', 0.1, 'constant', 0, weight_decay=0.1)
    after = run(config, PARAMETERS, [jax.tree.map(jnp.zeros_like, PARAMETERS)], AXES)[-1]
    values = {
        jax.tree_util.keystr(path): float(leaf.ravel()[0]) for path, leaf in jax.tree_util.tree_leaves_with_path(after)
    }
    for name, value in values.items():
        wanted = 0.99 if name.endswith("['kernel']") or name.endswith("['embedding']") else 1.0
        assert value == pytest.approx(wanted, abs=1e-6), name


def test_a_stacked_norm_under_an_unknown_name_is_spared_by_its_axes():
    params, axes = {'gain': {'weight': jnp.ones((3, 4))}}, {'gain': {'weight': ('layers', 'embed')}}
    assert not decay_mask(params, axes)['gain']['weight']
    assert decay_mask(params)['gain']['weight']  # two-dimensional, hence a matrix to anybody who lacks the axes


def test_clipping_bounds_the_global_norm():
    config = OptimizerConfig('adam', 1.0, 'constant', 0, clip_norm=1.0, eps=1.0)
    gradient = {'a': jnp.array([30.0]), 'b': jnp.array([40.0])}
    after = run(config, {'a': jnp.zeros(1), 'b': jnp.zeros(1)}, [gradient])[-1]
    assert float(after['a'][0]) == pytest.approx(-0.6 / 1.6, rel=1e-4)  # m / (sqrt(v) + eps) of the clipped 0.6


@pytest.mark.parametrize(
    'fields,message',
    [
        ({'name': 'adamm'}, "did you mean 'adam'"),
        ({'schedule': 'cosin'}, "did you mean 'cosine'"),
        ({'warmup_steps': 0}, "has no meaning for schedule 'noam'"),
        ({'weight_decay': 0.1}, "needs optimizer.name 'adamw'"),
    ],
)
def test_a_bad_choice_is_refused_in_words(fields, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**fields)
