"""A table of words used for lookups and logits: its gradient on a mesh, and how often that is reduced.

`test_parallel.py` holds whole models with such a table against one device.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parallel import CONFIG, packed_batch, random_params

from transformer_jax.analysis import hlo
from transformer_jax.layers import embedding
from transformer_jax.models import abstract_params, build
from transformer_jax.sharding import MeshConfig, batch_sharding, make_mesh, place_batch, resolve, tracing_on
from transformer_jax.training.config import TrainingConfig
from transformer_jax.training.step import make_gradient

B, T, V, D = 8, 4, 40, 16
CONFIG = CONFIG.replace(kind='decoder', tie_embeddings='output', vocab_size=V, d_model=D)
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(V, D)).astype(np.float32)
TOKENS = RANDOM.integers(0, V, (B, T))
SLOPES = RANDOM.normal(size=(B, T, V)).astype(np.float32)


def reductions(text):
    """Returns the shapes of all arrays which are all-reduced, axes of size 1 left out."""
    lines = [line for lines in hlo.parse(text).computations.values() for line in lines]
    arrays = [array for line in lines if line.opcode.startswith('all-reduce') for array in line.results]
    return [tuple(size for size in array.shape if size > 1) for array in arrays]


def on_mesh(sizes, dtype=jnp.float32, rows=B):
    """Returns (sum of `SLOPES` times logits of looked-up words, its gradient by the table, the compiled text)."""
    table, mesh = embedding.word_table(CONFIG, shared=True), make_mesh(MeshConfig(**sizes))

    def total(params, tokens, slopes):
        with tracing_on(mesh):
            logits = table.apply(params, tokens, method=lambda table, tokens: table.attend(table(tokens).astype(dtype)))
        return (logits * slopes).sum()

    placed = jax.device_put((TOKENS[:rows], SLOPES[:rows]), batch_sharding(mesh, 1) if rows == B else None)
    params = {'params': {'embedding': TABLE}}
    program = jax.jit(jax.value_and_grad(total)).lower(params, *placed).compile()
    value, gradient = program(params, *placed)
    return value, gradient['params']['embedding'], program.as_text()


def by_formula(rows=B):
    """y = E[token], logits = y E^T: dL/dE = G^T y, and to the row of each token G E is added."""
    tokens, slopes = TOKENS[:rows], SLOPES[:rows]
    y = TABLE[tokens]
    gradient = np.einsum('BTV,BTD->VD', slopes, y)
    np.add.at(gradient, tokens, slopes @ TABLE)
    return (y @ TABLE.T * slopes).sum(), gradient


@pytest.mark.parametrize('sizes', [
    dict(data=8), dict(data=2, sequence=4), dict(data=4, tensor=2), dict(data=1, sequence=2, expert=2, tensor=2),
], ids=str)  # fmt: skip
def test_the_gradient_is_that_of_numpy_and_is_all_reduced_once(sizes):
    value, gradient, text = on_mesh(sizes)
    expected = by_formula()
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-5 * np.abs(expected[1]).max())
    assert reductions(text).count((V // sizes.get('tensor', 1), D)) == 1


def test_operands_of_bfloat16_are_summed_in_float32():
    value, gradient, text = on_mesh(dict(data=4, tensor=2), jnp.bfloat16)
    # Operands have 8 bits, and errors of many terms cancel.
    np.testing.assert_allclose(gradient, by_formula()[1], atol=2e-2 * np.abs(gradient).max())
    assert gradient.dtype == jnp.float32 and reductions(text).count((V // 2, D)) == 1


@pytest.mark.parametrize('sizes, rows', [(dict(data=2, fsdp=2, tensor=2), B), (dict(data=8), 3)], ids=str)
def test_what_fsdp_splits_and_rows_which_do_not_divide_keep_the_table_itself(sizes, rows):
    value, gradient, text = on_mesh(sizes, rows=rows)
    expected = by_formula(rows)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-5 * np.abs(expected[1]).max())


def test_data_parallelism_sends_every_gradient_once_and_without_copies_the_tables_twice(monkeypatch):
    """A ring sends 2 (P - 1) / P of what it reduces: here all gradients, in fp32, and the sum of weights."""
    model, mesh = build(CONFIG), make_mesh(MeshConfig(data=8))
    shapes, axes = abstract_params(model)
    params = jax.device_put(random_params(shapes), resolve(shapes, axes, mesh))
    batch = packed_batch()
    names = {'tokens': 'target_tokens', 'segment_ids': 'target_segment_ids'}
    inputs = {name: batch['inputs'][old] for name, old in names.items()}
    batch = place_batch({**batch, 'inputs': inputs}, mesh)

    def gradient_and_bytes():
        def program(params, batch):
            with tracing_on(mesh):
                return make_gradient(model, TrainingConfig())(params, batch, jax.random.key(0)).gradient

        compiled = jax.jit(program).lower(params, batch).compile()
        return compiled(params, batch), sum(found.bytes for found in hlo.costs(compiled.as_text()).collectives)

    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    ours, sent = gradient_and_bytes()
    assert sent == 2 * 7 / 8 * 4 * (count + 1)
    monkeypatch.setattr(embedding, 'copy_to_parts', lambda table, axes: None)
    plain, sent = gradient_and_bytes()
    assert sent == 2 * 7 / 8 * 4 * (count + 1 + V * D)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max()), ours, plain)
