"""Sizes and costs: the paper's table 3, exact formulas, and what does not depend on the number of heads."""

import jax
import numpy as np
import oracles
import pytest
from tiny_models import model_and_params, product_flops, some_tokens, tiny

from transformer_jax.models import abstract_params, build, count_params
from transformer_jax.presets import preset

# Vaswani et al. 2017, table 3: what differs from the base model, and millions of parameters where given (the rows
# (A), (D) and (E) have the base model's 65). Label smoothing, the rest of row (D), is the training's.
TABLE_3 = {
    'base': ({}, 65),
    'A h=1': (dict(num_heads=1, d_k=512, d_v=512), 65),
    'A h=4': (dict(num_heads=4, d_k=128, d_v=128), 65),
    'A h=16': (dict(num_heads=16, d_k=32, d_v=32), 65),
    'A h=32': (dict(num_heads=32, d_k=16, d_v=16), 65),
    'B d_k=16': (dict(d_k=16, d_v=64), 58),
    'B d_k=32': (dict(d_k=32, d_v=64), 60),
    'C N=2': (dict(num_layers=2), 36),
    'C N=4': (dict(num_layers=4), 50),
    'C N=8': (dict(num_layers=8), 80),
    'C d_model=256': (dict(d_model=256, d_k=32, d_v=32), 28),
    'C d_model=1024': (dict(d_model=1024, d_k=128, d_v=128), 168),
    'C d_ff=1024': (dict(d_ff=1024), 53),
    'C d_ff=4096': (dict(d_ff=4096), 90),
    'D dropout=0': (dict(dropout=0.0), 65),
    'D dropout=0.2': (dict(dropout=0.2), 65),
    'E': (dict(position='learned', max_positions=512), 65),
}


def count(config):
    return count_params(abstract_params(build(config))[0])


def formula(config):
    return oracles.count_parameters(
        config.vocab_size, config.d_model, config.d_ff, config.num_heads, config.key_dim, config.value_dim,
        config.num_layers, config.num_layers, config.max_positions or 0,
    )  # fmt: skip


@pytest.mark.parametrize('name, millions', [('transformer_base', 65), ('transformer_big', 213)])
def test_presets_have_the_papers_number_of_parameters(name, millions):
    config = preset(name)
    assert config.vocab_size == 37000
    assert abs(count(config) / 1e6 - millions) < 0.04 * millions
    assert count(config) == formula(config)


@pytest.mark.parametrize('row', TABLE_3)
def test_every_row_of_table_3_is_a_config_of_the_formulas_size(row):
    """And within 4 percent of the base model of what the paper states for the row.

    The column seems to count about two million weights more than a vocabulary of 37000 gives; in the smallest rows
    that is more than 4 percent of the row.
    """
    changes, millions = TABLE_3[row]
    config = preset('transformer_base', **changes)
    assert count(config) == formula(config)
    assert abs(formula(config) / 1e6 - millions) < 0.04 * max(65, millions)


def test_parameters_and_products_do_not_depend_on_the_number_of_heads():
    """With d_k = d_v = D / h: splitting into heads is free, in weights and in multiplications."""
    source, target = some_tokens(2, 6), some_tokens(2, 5)
    flops, sizes = set(), set()
    for heads in (1, 2, 4, 8, 16):
        model = build(tiny(num_heads=heads))
        shapes, _ = abstract_params(model)
        flops.add(product_flops(lambda p, model=model: model.apply({'params': p}, source, target).logits, shapes))
        sizes.add(count_params(shapes))
    assert len(flops) == len(sizes) == 1
    B, T, S, D, F, V, L = 2, 5, 6, 16, 12, 23, 2
    encoder = 4 * S * D * D + 2 * S * D * F + 2 * S * S * D
    decoder = 6 * T * D * D + 2 * S * D * D + 2 * T * D * F + 2 * T * T * D + 2 * T * S * D
    assert flops == {2 * B * (L * (encoder + decoder) + T * D * V)}
    free = build(tiny(num_heads=8, d_k=16))
    assert count_params(abstract_params(free)[0]) not in sizes


def test_the_compiler_counts_the_same_operations_for_one_head_and_for_many():
    """The compiled cost is that of the products and of what is done once per element; scores have h times more."""
    tokens = some_tokens(4, 8)
    counted = []
    for heads in (1, 8):
        config = tiny(kind='decoder', num_layers=1, num_heads=heads, d_model=64, d_ff=256, tie_embeddings='none')
        model, params = model_and_params(config)

        def run(params, model=model):
            return model.apply({'params': params}, tokens).logits

        products = product_flops(run, params)
        total = jax.jit(run).lower(params).compile().cost_analysis()['flops']
        assert products < total < 1.2 * products
        counted.append(total - 4 * tokens.shape[0] * heads * tokens.shape[1] ** 2)
    np.testing.assert_allclose(counted[0], counted[1], rtol=0.01)
