"""Scanned, unrolled and rematerialised stacks against a loop by hand, with dropout on."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core.scope import LazyRng
from tiny_models import model_and_params, some_tokens, tiny

from transformer_jax.layers.norm import Norm
from transformer_jax.models import abstract_params, build, scan_params, unroll_params
from transformer_jax.models.stack import Block, Stack, StackInputs
from transformer_jax.ops.masks import Mask

TOKENS = some_tokens(3, 6)
KEY = jax.random.key(11)
DROPPING = tiny(
    kind='decoder', num_layers=2, layer_pattern=('local',), window=2, position='rope', norm_position='pre',
    dropout=0.3, ffn_dropout=0.2, attention_dropout=0.2, layer_stack='scan',
)  # fmt: skip


def assert_trees_close(one, other, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance * max(1, np.abs(a).max()))


def hidden_and_gradients(run, params, x):
    """The output of run(params, x), and the gradients of a random projection of it."""
    weight = jax.random.normal(jax.random.key(5), x.shape)

    def total(params, x):
        y = run(params, x)
        return (y * weight).sum(), y

    (_, y), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)
    return y, gradients


class Once(nn.Module):
    """Layer i of DROPPING under a given name, the `calls`-th call of it.

    Flax traces the body of a scan twice while its counters of keys run on, so that a scan draws second keys.
    """

    i: int
    calls: int
    block_name: str

    @nn.compact
    def __call__(self, x, inputs):
        block = Block(
            DROPPING, 'decoder', 'local', cross=False, first=self.i == 0, dense=False,
            deterministic=False, return_hiddens=False, return_attentions=False, name=self.block_name,
        )  # fmt: skip
        for _ in range(self.calls):
            y, _ = block(x, inputs)
        return y


@pytest.mark.usefixtures('quick_compilation')
@pytest.mark.parametrize('layer_stack', ['scan', 'unrolled'])
def test_a_stack_is_a_loop_over_its_blocks_with_dropout_on(layer_stack):
    """Values and gradients; each layer's key is split off or folded in by its name, so no two are alike."""
    config = DROPPING.replace(layer_stack=layer_stack)
    params = model_and_params(config)[1]['decoder']
    inputs = StackInputs(jnp.broadcast_to(jnp.arange(6), (3, 6)), Mask(causal=True))
    x = jax.random.normal(jax.random.key(2), (3, 6, 16))

    def whole(params, x):
        return Stack(config, 'decoder').apply({'params': params}, x, inputs, None, False, rngs={'dropout': KEY})[0]

    def apply(i, calls, name, own, x, rng):
        return Once(i, calls, name).apply({'params': {name: own}}, x, inputs, rngs={'dropout': rng})

    def loop(params, x):
        keys = jax.random.split(KEY, 2)
        for i in range(2):
            if layer_stack == 'scan':
                own = jax.tree.map(lambda leaf, i=i: leaf[i], params['layers']['block_0'])
                x = apply(i, 2, 'block_0', own, x, LazyRng.create(keys[i], 'layers'))
            else:
                x = apply(i, 1, f'layers_{i}', params[f'layers_{i}'], x, KEY)
        return Norm(config).apply({'params': params['final_norm']}, x)

    expected, actual = hidden_and_gradients(loop, params, x), hidden_and_gradients(whole, params, x)
    assert_trees_close(actual, expected)
    assert ('scan' in str(jax.make_jaxpr(whole)(params, x))) == (layer_stack == 'scan')
    assert 'scan' not in str(jax.make_jaxpr(loop)(params, x))


@pytest.mark.usefixtures('quick_compilation')
@pytest.mark.parametrize('choices', [
    # One period is scanned, one layer is left over.
    dict(kind='decoder', num_layers=3, layer_pattern=('local', 'global'), window=2, position='rope'),
    dict(num_layers=1, position='relative', norm_position='deepnorm'),
])  # fmt: skip
def test_scanned_equals_unrolled_in_values_and_gradients(choices):
    results = []
    for layer_stack in ('unrolled', 'scan'):
        config = tiny(**choices | dict(layer_stack=layer_stack))
        model, params = build(config), model_and_params(config.replace(layer_stack='unrolled'))[1]
        inputs = (TOKENS,) if config.kind == 'decoder' else (TOKENS, TOKENS[:, ::-1])

        def total(params, model=model, inputs=inputs):
            logits = model.apply({'params': params}, *inputs).logits
            return jnp.square(logits).mean(), logits

        params = params if layer_stack == 'unrolled' else scan_params(params, config)
        gradient, logits = jax.jit(jax.grad(total, has_aux=True))(params)
        results.append((unroll_params(gradient, config), logits))
    assert_trees_close(*results)


@pytest.mark.parametrize('choices', [
    {}, dict(num_layers=3, num_decoder_layers=1, norm_position='sandwich', position='relative'),
    dict(kind='decoder', num_layers=5, layer_pattern=('local', 'global'), window=3),
    dict(kind='decoder', num_layers=1, layer_pattern=('local', 'global'), window=3),
    dict(kind='encoder', num_layers=6, layer_pattern=('local', 'local', 'global'), window=3),
    dict(kind='encoder', num_layers=3, norm_position='pre', first_norm=False),
])  # fmt: skip
def test_scan_and_unroll_of_parameters_are_inverse_and_give_what_the_models_want(choices):
    scanned, unrolled = (tiny(**choices, layer_stack=kind) for kind in ('scan', 'unrolled'))
    for config in (scanned, unrolled):
        _, params = model_and_params(config)
        canonical = unroll_params(params, config)
        there_and_back = scan_params(canonical, config) if config is scanned else canonical
        jax.tree.map(np.testing.assert_array_equal, there_and_back, params)
        for tree, owner in ((canonical, unrolled), (scan_params(canonical, scanned), scanned)):
            shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_params(build(owner))[0])
            assert jax.tree.map(lambda leaf: leaf.shape, tree) == shapes
    depth = scanned.depth('decoder')
    if depth >= len(scanned.layer_pattern):
        _, axes = abstract_params(build(scanned))
        stack = axes['encoder' if scanned.kind == 'encoder' else 'decoder']
        assert stack['layers']['block_0']['attention']['query']['kernel'] == ('layers', 'embed', 'heads', 'head_dim')


def visible_dropout(**choices):
    """A model whose layer l adds exactly dropout(1): every kernel is zero, and the last bias of the FFN one."""
    config = tiny(kind='decoder', num_layers=3, norm_position='pre', final_norm=False, dropout=0.25, **choices)
    model, params = model_and_params(config)

    def pick(path, leaf):
        names = [entry.key for entry in path]
        return np.full_like(leaf, names[-2:] == ['down', 'bias']) if 'kernel' in names or 'bias' in names else leaf

    return model, jax.tree_util.tree_map_with_path(pick, params)


def masks_of_layers(model, params, *keys):
    """For each key, what each layer added."""
    tokens = some_tokens(4, 32)

    @jax.jit
    def hiddens(params, key):
        rngs = {'dropout': key}
        return model.apply({'params': params}, tokens, deterministic=False, return_hiddens=True, rngs=rngs).hiddens

    return [np.diff(np.stack(hiddens(params, key)), axis=0) for key in keys]


@pytest.mark.parametrize('layer_stack', ['scan', 'unrolled'])
def test_two_layers_and_two_keys_get_different_masks(layer_stack):
    model, params = visible_dropout(layer_stack=layer_stack)
    first, second, again = masks_of_layers(model, params, *(jax.random.key(seed) for seed in (0, 1, 0)))
    layers = [*first, *second]
    for layer in layers:
        np.testing.assert_allclose(np.unique(layer.round(4)), [0, 1.3333])
        assert abs((layer > 0.5).mean() - 0.75) < 0.04
    for i, one in enumerate(layers):
        for other in layers[:i]:
            # Independent masks of rate 0.25 agree in 0.75^2 + 0.25^2 of their elements.
            assert abs(((one > 0.5) == (other > 0.5)).mean() - 0.625) < 0.05
    np.testing.assert_array_equal(again, first)


@pytest.mark.usefixtures('quick_compilation')
def test_masks_of_the_backward_pass_are_those_of_the_forward_pass():
    """The gradient by the bias of layer l is the sum of its forward mask times the weights of the loss."""
    model, params = visible_dropout(layer_stack='scan', remat='full')
    weight = jax.random.normal(jax.random.key(5), (4, 32, 16))
    [masks] = masks_of_layers(model, params, jax.random.key(0))

    def total(params):
        rngs = {'dropout': jax.random.key(0)}
        out = model.apply({'params': params}, some_tokens(4, 32), deterministic=False, rngs=rngs)
        return (out.hidden * weight).sum()

    gradient = unroll_params(jax.jit(jax.grad(total))(params), model.config)['decoder']
    for i, mask in enumerate(masks):
        expected = (mask * np.asarray(weight)).sum((0, 1))
        np.testing.assert_allclose(np.asarray(gradient[f'layers_{i}']['ffn']['down']['bias']), expected, rtol=1e-4)


def compiled_gradient(config, params):
    model: nn.Module = build(config)

    def total(params, key):
        out = model.apply({'params': params}, TOKENS, deterministic=False, rngs={'dropout': key})
        return jnp.square(out.logits).mean(), out.logits

    return jax.jit(jax.value_and_grad(total, has_aux=True)).lower(params, KEY).compile()


def test_remat_changes_the_program_and_neither_values_nor_gradients_with_dropout_on():
    """Recomputing costs operations: all of a layer's for 'full', those beside its products for 'dots' and 'offload'."""
    config, ways = DROPPING, ('none', 'dots', 'offload', 'full')
    params = model_and_params(config)[1]
    programs = {remat: compiled_gradient(config.replace(remat=remat), params) for remat in ways}
    flops = {remat: program.cost_analysis()['flops'] for remat, program in programs.items()}
    assert flops['none'] < flops['dots'] < flops['full'] and flops['none'] < flops['offload'] < flops['full']
    results = {remat: program(params, KEY) for remat, program in programs.items()}
    for remat in ways[1:]:
        assert_trees_close(results[remat], results['none'])


def test_remat_of_unrolled_layers_is_another_program_with_the_same_results():
    config = DROPPING.replace(num_layers=1, layer_stack='unrolled')
    params = model_and_params(config)[1]
    none, full = (compiled_gradient(config.replace(remat=remat), params) for remat in ('none', 'full'))
    assert none.cost_analysis()['flops'] < full.cost_analysis()['flops']
    assert_trees_close(full(params, KEY), none(params, KEY))
