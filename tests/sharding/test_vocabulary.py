"""A vocabulary filled up so that it divides over devices: the rows past it count nowhere and are never exported."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import model_and_params, some_tokens, tiny
from toy_training import tiny_experiment

import transformer_jax
from transformer_jax.checkpoints.restore import list_arrays
from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.models import abstract_params, build, resize_vocabulary
from transformer_jax.sharding import MeshConfig, make_mesh, resolve
from transformer_jax.training.config import OptimizerConfig, TrainingConfig
from transformer_jax.training.loop import train
from transformer_jax.training.step import make_gradient

# 23 words in 24 rows, with every kind of table: of sources, targets and outputs, and a bias of words.
CHOICES = dict(kind='encoder_decoder', tie_embeddings='none', logits_bias=True, logits_softcap=5.0, num_layers=1)
PLAIN, PADDED = tiny(**CHOICES), tiny(**CHOICES, vocab_multiple=8)


@pytest.fixture(scope='module')
def both():
    """(model, parameters) without and with rows past the vocabulary, whose numbers there are large."""
    model, params = model_and_params(PADDED)
    axes = abstract_params(model)[1]

    def disturb(leaf, names):
        if 'vocab' in names:
            leaf = leaf.copy()
            leaf[tuple(slice(23, None) if name == 'vocab' else slice(None) for name in names)] = 50.0
        return leaf

    leaves, structure = jax.tree.flatten(params)
    params = structure.unflatten(map(disturb, leaves, structure.flatten_up_to(axes)))
    return (build(PLAIN), resize_vocabulary(params, axes, 23)), (model, params)


def test_padding_divides_and_the_true_size_stays():
    assert (PADDED.vocab_size, PADDED.vocab_rows, PLAIN.vocab_rows) == (23, 24, 23)
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    with pytest.raises(UserError, match="'vocab' of size 23 does not divide by mesh axis 'tensor' 4"):
        resolve(*abstract_params(build(PLAIN)), mesh)
    resolve(*abstract_params(build(PADDED)), mesh)
    with pytest.raises(UserError, match='model.vocab_multiple = 0'):
        tiny(vocab_multiple=0)


def test_loss_and_gradients_are_those_of_the_plain_vocabulary(both):
    """With label smoothing, which spreads over the true words, and a z-loss."""
    source, target, labels = (some_tokens(2, 5, seed=seed) for seed in range(3))
    batch = {
        'inputs': {'source_tokens': source, 'target_tokens': target}, 'labels': labels, 'weights': np.ones((2, 5)),
    }  # fmt: skip
    results = []
    for model, params in both:
        config = TrainingConfig(label_smoothing=0.1, z_loss=0.01)
        gradient = make_gradient(model, config, model.config.vocab_size)
        results.append((model, *jax.jit(lambda p, gradient=gradient: gradient(p, batch, jax.random.key(0)))(params)))
    (_, loss, weight, slopes, *_), (model, padded_loss, padded_weight, padded_slopes, *_) = results
    np.testing.assert_allclose([loss, weight], [padded_loss, padded_weight], rtol=1e-6)
    axes = abstract_params(model)[1]
    trimmed = resize_vocabulary(padded_slopes, axes, 23)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), slopes, trimmed)
    refilled = resize_vocabulary(trimmed, axes, 24)
    jax.tree.map(np.testing.assert_array_equal, refilled, jax.tree.map(np.asarray, padded_slopes))


def test_words_past_the_vocabulary_are_minus_infinity_never_generated_and_give_nan_when_read(both):
    (plain, params), (padded, padded_params) = both
    source, target = some_tokens(2, 5), some_tokens(2, 4, seed=1)

    def logits(model, params, target):
        apply = jax.jit(lambda p, x: model.apply({'params': p}, source_tokens=source, target_tokens=x).logits)
        return np.asarray(apply(params, target))

    mine = logits(padded, padded_params, target)
    np.testing.assert_allclose(mine[..., :23], logits(plain, params, target), atol=1e-6)
    assert mine.shape[-1] == 24 and np.all(mine[..., 23:] == -np.inf)
    target[0, 2] = 23
    broken = logits(padded, padded_params, target)
    assert np.isnan(broken[0, 2, :23]).all() and np.isfinite(broken[1, :, :23]).all()
    search = transformer_jax.DecodeConfig(max_new_tokens=4, beam_size=3, num_return=3)
    found = [transformer_jax.generate(model, p, source, config=search) for model, p in both]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_allclose(found[0].scores, found[1].scores, atol=1e-5)
    assert found[1].tokens.max() < 23


def test_exported_folders_have_the_true_vocabulary(tmp_path):
    choices = dict(
        kind='decoder', position='rope', norm='rms', norm_position='pre', ffn='gated_silu', ffn_bias=False,
        embedding_scale='none', tie_embeddings='none', num_layers=1, max_positions=None,
    )  # fmt: skip
    model, params = model_and_params(tiny(**choices, vocab_multiple=8))
    trimmed = resize_vocabulary(params, abstract_params(model)[1], 23)
    transformer_jax.save_pretrained(tmp_path / 'padded', model, params, family='llama')
    transformer_jax.save_pretrained(tmp_path / 'plain', build(tiny(**choices)), trimmed, family='llama')
    for name in ('model.safetensors', 'config.json'):
        assert (tmp_path / 'padded' / name).read_bytes() == (tmp_path / 'plain' / name).read_bytes()
    loaded, _ = transformer_jax.load_pretrained(tmp_path / 'padded')
    assert isinstance(loaded.config, ModelConfig) and loaded.config.vocab_rows == 23


def test_a_run_goes_on_with_the_vocabulary_filled_up_for_another_mesh(tmp_path):
    optimizer = OptimizerConfig('adamw', 0.01, 'constant', 0, eps=1e-2)

    def sitting(name, steps, multiple, sizes):
        model = dict(layer_stack='unrolled', vocab_multiple=multiple)
        experiment = tiny_experiment(tmp_path, optimizer=optimizer, model=model, steps=steps, ema_decay=0.9)
        train(dataclasses.replace(experiment, mesh=MeshConfig(**sizes)), tmp_path / name)

    sitting('straight', 4, 1, {})
    sitting('moved', 2, 1, {})
    sitting('moved', 4, 4, dict(data=1, fsdp=4, tensor=2, rules='vocab=fsdp,embed=none'))
    (plain, straight), (trimmed, moved) = (transformer_jax.restore(tmp_path / name) for name in ('straight', 'moved'))
    assert plain.config.vocab_rows == trimmed.config.vocab_rows == 290
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), straight, moved)
    assert list_arrays(tmp_path / 'moved')['params/embedding/embedding'].shape == (292, 16)
