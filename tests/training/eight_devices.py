"""Run by test_step.py with eight devices: a sharded, accumulated step equals one device's."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_step import setup
from toy_training import Toy, batch

from transformer_jax.training.config import OptimizerConfig, TrainingConfig
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.state import abstract_state, init_state, state_shardings, with_shardings
from transformer_jax.training.step import make_train_step

assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
rows, model = batch(rows=16), Toy()
rows['weights'][:2] = 0  # a device without any counted token
config, optimizer_config = TrainingConfig(accumulate=2), OptimizerConfig('adam', 0.01, 'constant', 0)
schedule = make_schedule(optimizer_config, 8, 10)
optimizer = make_optimizer(optimizer_config, schedule)


def init(key):
    return model.init(key, jnp.zeros((1, 2), jnp.int32))['params']


abstract = abstract_state(jax.eval_shape(init, jax.random.key(0)), optimizer)
replicated = NamedSharding(mesh, PartitionSpec())
params = jax.tree.map(lambda _: replicated, abstract.params)
params['embedding']['embedding'] = NamedSharding(mesh, PartitionSpec(None, 'data'))
shardings = state_shardings(abstract, params, replicated)
assert shardings.opt_state[0].mu['embedding']['embedding'].spec == PartitionSpec(None, 'data')
state = init_state(init, optimizer, jax.random.key(0), shardings=shardings)
step = make_train_step(model, optimizer, schedule, config, shardings)
spread = jax.device_put(rows, NamedSharding(mesh, PartitionSpec('data')))
text = step.lower(with_shardings(abstract, shardings), spread).compile().as_text()
assert 'all-reduce' in text
alone_step, alone = setup(accumulate=2)
for _ in range(3):
    state, metrics = step(state, spread)
    alone, alone_metrics = alone_step(alone, rows)
    np.testing.assert_allclose(metrics['loss'], alone_metrics['loss'], rtol=1e-5)
    np.testing.assert_allclose(metrics['gradient_norm'], alone_metrics['gradient_norm'], rtol=1e-4)
assert state.params['embedding']['embedding'].sharding.spec == PartitionSpec(None, 'data')
print('equal')
