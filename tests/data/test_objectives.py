"""Objectives other than translation: what the model reads and what it learns, against the text itself."""

import math

import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import objectives, pipeline, planner, sources, tokenizers
from transformer_jax.errors import UserError

TEXTS = sources.open_source('moby_dick', limit=60)


@pytest.fixture(scope='module')
def vocabulary(cache_directory):
    symbols = (data_config.MASK, *data_config.SENTINELS)
    texts = [example['text'] for example in sources.iterate(TEXTS)]
    return tokenizers.train_tokenizer(texts, 600, cache_directory, symbols)


def _make(vocabulary, objective, **fields):
    small = {'source_length': 32, 'target_length': 32, 'batch_tokens': 1024, 'row_multiple': 4}
    config = data_config.DataConfig(**{'objective': objective, 'train': 'moby_dick', **small, **fields})
    return config, objectives.make_objective(config, vocabulary)


def _train(vocabulary, objective, seed=0, source=TEXTS, process=(0, 1), **fields):
    config, made = _make(vocabulary, objective, **fields)
    return pipeline.TrainPipeline(source, vocabulary, made, config, seed, *process)


def _equal(one, two):
    parts = [{**batch['inputs'], 'labels': batch['labels'], 'weights': batch['weights']} for batch in (one, two)]
    return all(np.array_equal(parts[0][name], parts[1][name]) for name in parts[0])


def _segments(rows, segment_ids):
    return [row[ids == n] for row, ids in zip(rows, segment_ids, strict=True) for n in range(1, ids.max() + 1)]


def test_causal_pieces_are_the_whole_text_and_inputs_are_labels_shifted_inside_each(vocabulary):
    train = _train(vocabulary, 'causal_lm')
    found = []
    for step in range(train.steps_per_epoch):
        batch = train.batch(step)
        ids = batch['inputs']['segment_ids']
        assert np.array_equal(batch['weights'], (ids > 0).astype(np.float32))
        labels, inputs, positions = (
            _segments(part, ids) for part in (batch['labels'], batch['inputs']['tokens'], batch['inputs']['positions'])
        )
        for learnt, read, place in zip(labels, inputs, positions, strict=True):
            assert read.tolist() == [vocabulary.bos_id, *learnt[:-1]] and place.tolist() == list(range(len(learnt)))
        found += [piece.tolist() for piece in labels]
    expected = []
    for example in sources.iterate(TEXTS):
        whole = [*vocabulary.encode(example['text']), vocabulary.eos_id]
        expected += [whole[at : at + 32] for at in range(0, len(whole), 32)]
    assert sorted(found) == sorted(expected)


def test_bits_per_byte_are_those_of_a_uniform_model_over_bytes_by_hand(vocabulary):
    _, objective = _make(vocabulary, 'causal_lm')
    source = sources.ListSource([{'text': 'whale'}, {'text': 'éa'}], languages=('text',))
    found = objective.metrics(
        {'loss': (8 * 8 * math.log(2), 10.0), 'accuracy': (5.0, 10.0)}, objective.encode(source, False)
    )
    assert found['bits_per_byte'] == pytest.approx(8.0) and found['accuracy'] == 0.5


def test_a_prefix_is_seen_but_never_learnt(vocabulary):
    train = _train(vocabulary, 'prefix_lm', batching='bucket', bucket_boundaries=())
    prefixes = []
    for step in range(train.steps_per_epoch):
        batch = train.batch(step)
        for read, mask, prefix, labels, weights in zip(
            batch['inputs']['tokens'], batch['inputs']['mask'], batch['inputs']['prefix'], batch['labels'],
            batch['weights'], strict=True,
        ):  # fmt: skip
            length = mask.sum()
            if not length:
                assert prefix == 0 and not weights.any()
                continue
            assert 1 <= prefix <= length
            # Slot t sees slots up to max(t, prefix - 1), and label t stands in slot t + 1.
            hidden = [t + 1 > max(t, prefix - 1) for t in range(length)]
            assert weights[:length].tolist() == hidden and not weights[length:].any()
            assert read[1:length].tolist() == labels[: length - 1].tolist()
            prefixes.append(prefix / length)
    assert 0.4 < np.mean(prefixes) < 0.65


@pytest.mark.parametrize('rate', [0.15, 1.0])
def test_masking_never_chooses_special_ids_or_padding(vocabulary, rate):
    config, objective = _make(vocabulary, 'masked_lm', mask_rate=rate)
    text = sources.ListSource([{'text': 'Call me'}, {'text': 'whale'}], languages=('text',))
    examples = objective.encode(text, True)
    original = examples.streams[0][0]
    assert original[0] == vocabulary.bos_id and original[-1] == vocabulary.eos_id
    chosen = 0
    for seed in range(100):
        batch = objective.batch(examples, planner.Batch(0, (32,), np.array([0]), np.array([0, 1, 1])), False, seed)
        read, labels, weights = batch['inputs']['tokens'], batch['labels'], batch['weights'].astype(bool)
        row = np.pad(original, (0, 32 - len(original)), constant_values=vocabulary.pad_id)
        assert not weights[0, [0, *range(len(original) - 1, 32)]].any() and not weights[1].any()
        assert (labels[0] == np.where(weights[0], row, vocabulary.pad_id)).all()
        assert (read[0] == row)[~weights[0]].all()
        chosen += weights.sum()
    assert abs(chosen / (100 * (len(original) - 2)) - rate) < 0.06


def test_of_the_chosen_eighty_percent_are_masked_ten_random_ten_kept(vocabulary):
    config, objective = _make(vocabulary, 'masked_lm', mask_rate=1.0, source_length=2048, batch_tokens=1 << 14)
    whole = ' '.join(example['text'] for example in sources.iterate(TEXTS))
    examples = objective.encode(sources.ListSource([{'text': whole}] * 12, languages=('text',)), True)
    rows = len(examples.ids)
    plan = planner.Batch(0, (2048,), np.arange(rows), np.arange(rows + 1))
    batch = objective.batch(examples, plan, False, 0)
    chosen = batch['weights'] > 0
    read, labels = batch['inputs']['tokens'][chosen], batch['labels'][chosen]
    assert chosen.sum() > 100_000
    masked = read == objective.mask_id
    kept = read == labels
    assert abs(masked.mean() - 0.8) < 0.01 and abs(kept.mean() - 0.1) < 0.01
    assert np.isin(read[~masked], vocabulary.ordinary_ids).all()


def _rebuilt(source, target, sentinels, eos):
    """Puts the spans of a target back where their sentinels stand in its source."""
    assert source[-1] == target[-1] == eos
    spans, name = {}, None
    for token in target[:-1]:
        if token in sentinels:
            name = token
            spans[name] = []
        else:
            spans[name].append(token)
    assert list(spans) == sentinels[: len(spans)] and spans[name] == []
    assert [token for token in source if token in sentinels] == sentinels[: len(spans) - 1]
    rebuilt = []
    for token in source[:-1]:
        rebuilt += spans[token] if token in sentinels else [token]
    return rebuilt, [len(span) for span in list(spans.values())[:-1]]


def test_spans_put_back_give_the_text_and_have_the_density_and_mean_of_the_paper(vocabulary):
    config, objective = _make(vocabulary, 'span_corruption', source_length=128, target_length=64, batch_tokens=4096)
    sentinels = [vocabulary.symbol(name) for name in data_config.SENTINELS]
    for length in [0, 1, 2, 3, 7, 20, 100, objective.piece_length]:
        tokens = np.random.default_rng(length).choice(vocabulary.ordinary_ids, length)
        source, target = objective.corrupt(tokens, np.random.default_rng(1))
        rebuilt, spans = _rebuilt(source.tolist(), target.tolist(), sentinels, vocabulary.eos_id)
        assert rebuilt == tokens.tolist()
        assert len(source) <= 128 and len(target) <= 64
        if length >= 2:
            assert sum(spans) == max(round(0.15 * length), 1) and len(spans) == max(round(sum(spans) / 3), 1)
            assert source[0] not in sentinels


def test_packed_spans_fill_the_rows_which_were_planned(vocabulary):
    train = _train(vocabulary, 'span_corruption')
    planned = [lengths for lengths in train._examples.lengths]
    for epoch in (0, 1):
        steps = range(epoch * train.steps_per_epoch, (epoch + 1) * train.steps_per_epoch)
        batches = [train.batch(step) for step in steps]
        for side, column in (('source', 0), ('target', 1)):
            real = sum(batch['inputs'][f'{side}_mask'].sum() for batch in batches)
            assert real == sum(lengths[column] for lengths in planned)


@pytest.mark.parametrize('objective', ['masked_lm', 'span_corruption', 'prefix_lm'])
def test_draws_follow_seed_and_epoch_and_hosts_agree(vocabulary, objective):
    batching = {'batching': 'bucket'} if objective == 'prefix_lm' else {}
    one, again = (_train(vocabulary, objective, **batching) for _ in range(2))
    assert _equal(one.batch(1), again.batch(1))
    assert not _equal(one.batch(1), _train(vocabulary, objective, seed=1, **batching).batch(1))
    made, examples = one._objective, one._examples
    plan = one._planner.batch(0)
    packed = not batching
    first, second = (made.batch(examples, plan._replace(epoch=epoch), packed, 0) for epoch in (0, 1))
    assert not _equal(first, second)
    halves = [_train(vocabulary, objective, process=(index, 2), **batching).batch(0) for index in (0, 1)]
    whole = one.batch(0)
    for name, rows in whole['inputs'].items():
        assert np.array_equal(np.concatenate([half['inputs'][name] for half in halves]), rows)
    assert np.array_equal(np.concatenate([half['weights'] for half in halves]), whole['weights'])


def test_every_labelled_text_is_evaluated_once_with_its_label(vocabulary):
    rows = [{'label': n % 3, 'text': f'sentence {"long " * n}'} for n in range(10)]
    source = sources.ListSource(rows, languages=('text',))
    config, objective = _make(vocabulary, 'classification', batching='bucket', evaluation_rows=4)
    evaluation = pipeline.EvaluationPipeline(source, vocabulary, objective, config)
    seen = []
    for batch in evaluation:
        assert batch['labels'].shape == batch['weights'].shape == (4,)
        assert ((batch['example_ids'] >= 0) == (batch['weights'] > 0)).all()
        for number, label, weight, tokens in zip(
            batch['example_ids'], batch['labels'], batch['weights'], batch['inputs']['tokens'], strict=True
        ):
            if weight:
                assert label == rows[number]['label']
                expected = vocabulary.encode(rows[number]['text'])[:30]
                whole = [vocabulary.bos_id, *expected, vocabulary.eos_id]
                assert tokens.tolist() == whole + [vocabulary.pad_id] * (32 - len(whole))
                seen.append(number)
    assert sorted(seen) == list(range(10))
    assert objective.metrics({'loss': (5.0, 5.0), 'accuracy': (4.0, 5.0)}, evaluation.examples)['accuracy'] == 0.8


def test_what_does_not_fit_is_told_in_one_line(vocabulary, tokenizer, source):
    with pytest.raises(UserError, match="one example in a row; set data.batching = 'bucket'"):
        data_config.DataConfig(objective='classification')
    with pytest.raises(UserError, match="has no symbol '<mask>'"):
        _make(tokenizer, 'masked_lm')
    with pytest.raises(UserError, match='has source, target but no text'):
        _train(vocabulary, 'causal_lm', source=source)
    with pytest.raises(UserError, match="needs model.kind = 'encoder', not 'decoder'"):
        config, _ = _make(vocabulary, 'masked_lm')
        objectives.make_objective(config, vocabulary, ModelConfig(kind='decoder'))
    config = data_config.DataConfig(objective='classification', batching='bucket')
    model = ModelConfig(kind='encoder', head='classes', pooling='mean', num_classes=2)
    labelled = sources.ListSource([{'label': 2, 'text': 'a'}], 'file', ('text',))
    with pytest.raises(UserError, match='gives example 1 the label 2; model.num_classes = 2 allows 0 to 1'):
        objectives.make_objective(config, vocabulary, model).encode(labelled, True)
