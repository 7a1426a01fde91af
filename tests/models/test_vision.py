"""The vision encoder: patches against a convolution, pooling, and images it cannot read."""

import jax
import numpy as np
import pytest
from tiny_models import by_name, model_and_params, tiny

from transformer_jax.config import ModelConfig
from transformer_jax.decoding.cache_api import init_cache
from transformer_jax.errors import UserError
from transformer_jax.models import build, scan_params
from transformer_jax.subconfigs import PatchConfig

PATCHES = PatchConfig((6, 8), (2, 4), 3)
CHOICES = dict(
    kind='vision', patches=PATCHES, position='learned', norm_position='pre', max_positions=None, tie_embeddings='none',
    embedding_scale='none', head='classes', num_classes=5, pooling='first', ffn='gelu',
)  # fmt: skip
IMAGES = np.random.default_rng(0).normal(size=(2, 6, 8, 3)).astype(np.float32)


def run(model, params, images=IMAGES):
    return jax.jit(lambda p, x: model.apply({'params': p}, images=x, return_hiddens=True))(params, images)


def test_patches_are_the_convolution_whose_stride_is_its_size_then_positions_are_added():
    config = tiny(**CHOICES, num_layers=1)
    model, params = model_and_params(config)
    out, p = run(model, params), by_name(params, config)
    kernel = p['patches']['projection']['kernel']
    x = jax.lax.conv_general_dilated(IMAGES, kernel, (2, 4), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
    x = np.asarray(x + p['patches']['projection']['bias']).reshape(2, 6, 16)
    first = np.broadcast_to(p['patches']['class_token']['embedding'], (2, 1, 16))
    expected = np.concatenate([first, x], axis=1) + p['embedder']['position']['embedding']
    np.testing.assert_allclose(out.hiddens[0], expected, atol=1e-5)
    assert out.logits.shape == (2, 5) and out.hidden.shape == (2, 7, 16)


@pytest.mark.parametrize('pooling, class_token', [('first', True), ('mean', False), ('mean', True)])
def test_classes_are_a_linear_map_of_the_class_token_or_of_the_mean(pooling, class_token):
    patches = PatchConfig((6, 8), (2, 4), 3, class_token)
    config = tiny(**CHOICES | dict(patches=patches, pooling=pooling, head_activation='tanh'), num_layers=1)
    model, params = model_and_params(config)
    out, p = run(model, params), by_name(params, config)
    hidden = np.asarray(out.hidden)
    pooled = hidden[:, 0] if pooling == 'first' else hidden.mean(1)
    pooled = np.tanh(pooled @ p['head_layer']['dense']['kernel'] + p['head_layer']['dense']['bias'])
    np.testing.assert_allclose(out.pooled, pooled, atol=1e-5)
    expected = pooled @ p['head']['output']['kernel'] + p['head']['output']['bias']
    np.testing.assert_allclose(out.logits, expected, atol=1e-5)


def test_every_patch_sees_every_patch_and_scan_equals_loop():
    config = tiny(**CHOICES, num_layers=3)
    model, params = model_and_params(config)
    out = run(model, params)
    scan = build(config.replace(layer_stack='scan'))
    np.testing.assert_allclose(run(scan, scan_params(params, scan.config)).logits, out.logits, atol=2e-5)
    changed = IMAGES.copy()
    changed[:, -1, -1] += 1
    assert np.abs(run(model, params, changed).hidden - out.hidden).max(axis=(0, 2)).min() > 1e-4


def test_images_of_another_shape_are_refused_and_there_is_no_cache():
    model, params = model_and_params(tiny(**CHOICES, num_layers=1))
    for wrong in (IMAGES[:, :4], IMAGES[..., :1], IMAGES[0], np.moveaxis(IMAGES, 3, 1)):
        with pytest.raises(UserError, match=r'\(batch, 6, 8, 3\)'):
            model.apply({'params': params}, images=wrong)
    with pytest.raises(UserError, match='no cache'):
        init_cache(model, 1, 4)


@pytest.mark.parametrize('wrong', [
    dict(patches=None),
    dict(kind='encoder'),
    dict(max_positions=7),
    dict(tie_embeddings='output'),
    dict(head='lm', num_classes=None, pooling='none'),
    dict(patches=PatchConfig((6, 8), (2, 4), 3, class_token=False)),
])  # fmt: skip
def test_choices_which_images_have_not_are_refused(wrong):
    with pytest.raises(UserError, match='model'):
        tiny(**CHOICES | wrong)


def test_patches_which_do_not_divide_are_refused_and_a_config_survives_json():
    with pytest.raises(UserError, match='5 does not divide the height 32'):
        PatchConfig((32, 32), (5, 4))
    assert ModelConfig.from_dict(tiny(**CHOICES).to_dict()) == tiny(**CHOICES)
