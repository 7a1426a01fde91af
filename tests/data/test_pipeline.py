import logging

import jax
import numpy as np
import pytest

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import objectives, pipeline, ragged, sources

both = pytest.mark.parametrize('batching', ['pack', 'bucket'])


def _equal(one, two):
    return jax.tree.structure(one) == jax.tree.structure(two) and jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, two)
    )


def _packed_positions(segment_ids):
    """Counts on from 0 wherever the segment changes; padding is 0."""
    out, last, count = [], None, 0
    for segment in segment_ids:
        count = 0 if segment != last else count + 1
        out.append(0 if segment == 0 else count)
        last = segment
    return out


def test_positions_begin_again_in_each_sentence_of_a_row():
    sequences = ragged.Ragged.join([[7, 8, 9], [4, 5], [6]])
    rows = ragged.fill_rows(sequences, np.array([0, 1, 2]), np.array([0, 2, 2, 3]), 7, pad=0)
    assert rows.tokens.tolist() == [[7, 8, 9, 4, 5, 0, 0], [0] * 7, [6, 0, 0, 0, 0, 0, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0, 0], [0] * 7, [1, 0, 0, 0, 0, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0] * 7, [0] * 7]
    assert rows.shifted(start=3, pad=0).tolist() == [[3, 7, 8, 3, 4, 0, 0], [0] * 7, [3, 0, 0, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match='5 tokens do not fit into a row of 4'):
        ragged.fill_rows(sequences, np.array([0, 1]), np.array([0, 2]), 4, pad=0)


@both
def test_batches_hold_every_pair_as_the_tokenizer_gives_it(source, tokenizer, make, batching):
    config, objective = make(batching=batching)
    train = pipeline.TrainPipeline(source, tokenizer, objective, config, seed=0)
    seen = []
    for step in range(train.steps_per_epoch):
        batch, ids = train.batch(step), train.example_ids(step)
        inputs, packed = batch['inputs'], batching == 'pack'
        assert len(ids) == len(batch['labels'])
        for row, row_ids in enumerate(ids):
            sources_row, targets_row, starts_row = [], [], []
            for example in row_ids:
                pair = source[int(example)]
                target = tokenizer.encode(pair['target'])[:63]
                sources_row += [*tokenizer.encode(pair['source'])[:63], tokenizer.eos_id]
                targets_row += [*target, tokenizer.eos_id]
                starts_row += [tokenizer.bos_id, *target]
            padded = {'source_tokens': sources_row, 'target_tokens': starts_row}
            for name, tokens in padded.items():
                width = inputs[name].shape[1]
                assert inputs[name][row].tolist() == tokens + [0] * (width - len(tokens))
                mask = inputs[name.replace('tokens', 'mask')][row]
                assert mask.tolist() == [1] * len(tokens) + [0] * (width - len(tokens))
            width = batch['labels'].shape[1]
            assert batch['labels'][row].tolist() == targets_row + [0] * (width - len(targets_row))
            assert batch['weights'][row].tolist() == [1.0] * len(targets_row) + [0.0] * (width - len(targets_row))
            for side in ('source', 'target') if packed else ():
                segments = inputs[f'{side}_segment_ids'][row].tolist()
                assert inputs[f'{side}_positions'][row].tolist() == _packed_positions(segments)
                assert max(segments) == len(row_ids)
            seen += row_ids.tolist()
        assert {leaf.dtype for leaf in inputs.values()} == {np.dtype(np.int32)}
        assert batch['weights'].dtype == np.float32 and batch['labels'].dtype == np.int32
    assert sorted(seen) == list(range(300))


@both
def test_restarted_run_goes_on_with_the_batches_of_the_straight_one(source, tokenizer, make, batching):
    config, objective = make(batching=batching, prefetch=5)

    def run():
        return pipeline.TrainPipeline(source, tokenizer, objective, config, seed=3)

    first, second = run(), run()
    steps = first.steps_per_epoch + 7
    iterator = first.iterate()
    straight = [next(iterator) for _ in range(steps)]
    # Stop after 5 batches, while others are built ahead, and begin again from the step alone.
    stopped = second.iterate()
    resumed = [next(stopped) for _ in range(5)]
    stopped.close()
    going_on = run().iterate(start_step=5)
    resumed += [next(going_on) for _ in range(steps - 5)]
    assert all(_equal(a, b) for a, b in zip(straight, resumed, strict=True))
    # One iterator reads ahead in Grain, the other computes each step alone.
    assert all(_equal(a, first.batch(step)) for step, a in enumerate(straight))
    assert not _equal(straight[0], straight[1])
    iterator.close(), going_on.close()


def test_hundred_numbered_examples_come_once_an_epoch_across_a_restart(tokenizer, make):
    source = sources.ListSource([{'source': f'number {i}', 'target': f'Nummer {i}'} for i in range(100)])
    for batching in ('pack', 'bucket'):
        config, objective = make(batching=batching, source_length=16, target_length=16, batch_tokens=8 * 32)

        def ids(steps, config=config, objective=objective):
            train = pipeline.TrainPipeline(source, tokenizer, objective, config, seed=1)
            return [i for step in steps for row in train.example_ids(step) for i in row.tolist()], train

        _, train = ids([])
        epoch = train.steps_per_epoch
        before, _ = ids(range(3))
        after, _ = ids(range(3, epoch))
        following, _ = ids(range(epoch, 2 * epoch))
        assert before + after == ids(range(epoch))[0]
        assert sorted(before + after) == sorted(following) == list(range(100))
        assert before + after != following


@both
@pytest.mark.parametrize('hosts', [2, 4])
def test_hosts_together_build_the_batch_of_one_host(source, tokenizer, make, batching, hosts):
    config, objective = make(batching=batching)
    alone = pipeline.TrainPipeline(source, tokenizer, objective, config, 0)
    parts = [pipeline.TrainPipeline(source, tokenizer, objective, config, 0, host, hosts) for host in range(hosts)]
    for step in (0, 1, alone.steps_per_epoch - 1, alone.steps_per_epoch + 2):
        joined = jax.tree.map(lambda *rows: np.concatenate(rows), *[part.batch(step) for part in parts])
        assert _equal(joined, alone.batch(step))
    assert _equal_shapes(parts[0].shapes(), alone.shapes())


def _equal_shapes(one, two):
    return [jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree) for tree in one] == [
        jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree) for tree in two
    ]


@both
def test_every_batch_has_one_of_the_stated_shapes(source, tokenizer, make, batching):
    config, objective = make(batching=batching)
    train = pipeline.TrainPipeline(source, tokenizer, objective, config, 0)
    stated = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in train.shapes()]
    met = [jax.tree.map(np.shape, train.batch(step)) for step in range(train.steps_per_epoch)]
    assert all(shape in stated for shape in met) and all(shape in met for shape in stated)
    assert len(stated) == (1 if batching == 'pack' else 3)


def test_worker_processes_build_the_same_batches(source, tokenizer, make):
    config, objective = make(workers=2, prefetch=2)
    train = pipeline.TrainPipeline(source, tokenizer, objective, config, 0)
    iterator = train.iterate(start_step=4)
    batches = [next(iterator) for _ in range(5)]
    iterator.close()
    assert all(_equal(batch, train.batch(4 + i)) for i, batch in enumerate(batches))


@pytest.mark.parametrize('rows, hosts', [(1, 1), (3, 1), (4, 2), (8, 8), (16, 4)])
def test_evaluation_counts_every_example_once(tokenizer, make, rows, hosts):
    source = sources.open_source('soft.en-de', 'valid', limit=10)
    config, objective = make(evaluation_rows=rows)
    parts = [pipeline.EvaluationPipeline(source, tokenizer, objective, config, host, hosts) for host in range(hosts)]
    steps = -(-10 // rows)
    assert {len(part) for part in parts} == {steps}
    ids, tokens, shapes = [], 0, set()
    for batches in zip(*parts, strict=True):
        for batch in batches:
            shapes.add(str(jax.tree.map(np.shape, batch)))
            real = batch['example_ids'] >= 0
            ids += batch['example_ids'][real].tolist()
            tokens += batch['weights'].sum()
            assert not batch['weights'][~real].any() and (batch['weights'].sum(axis=1) > 0).tolist() == real.tolist()
            for row, example in zip(batch['labels'][real], batch['example_ids'][real], strict=True):
                assert tokenizer.decode(row) == source[int(example)]['target']
    assert sorted(ids) == list(range(10)) and len(shapes) == 1
    assert tokens == sum(len(tokenizer.encode(source[i]['target'])) + 1 for i in range(10))


def test_evaluation_keeps_what_training_leaves_out_and_both_say_so(tokenizer, make, caplog):
    pairs = [('a', 'b'), ('', 'b'), ('a', ''), ('word ' * 40, 'b'), ('a', 'wort ' * 40), ('c', 'd')]
    source = sources.ListSource([{'source': a.strip(), 'target': b.strip()} for a, b in pairs], 'six')
    fields = {'source_length': 8, 'target_length': 8, 'batch_tokens': 64}
    expected = {'skip': [0, 5], 'truncate': [0, 3, 4, 5]}
    for too_long, kept in expected.items():
        config, objective = make(too_long=too_long, **fields)
        with caplog.at_level(logging.INFO):
            train = pipeline.TrainPipeline(source, tokenizer, objective, config, 0)
        ids = [i for step in range(train.steps_per_epoch) for row in train.example_ids(step) for i in row.tolist()]
        assert sorted(ids) == kept
        counts = '2 cut, 0 too long' if too_long == 'truncate' else '0 cut, 2 too long'
        assert f'{counts} and left out, 2 empty and left out' in train.describe()
        assert f'{100 * train.padding_share:.1f} % padding' in train.describe() and train.describe() in caplog.messages
        evaluation = pipeline.EvaluationPipeline(source, tokenizer, objective, config.replace(evaluation_rows=4))
        assert sorted(i for batch in evaluation for i in batch['example_ids'].tolist()) == [-1, -1, 0, 1, 2, 3, 4, 5]
        assert '2 cut, 0 too long and left out, 0 empty and left out' in evaluation.describe()
        for batch in evaluation:
            ends = batch['inputs']['source_mask'].sum(axis=1)
            for row, end in enumerate(ends):
                assert end == 0 or batch['inputs']['source_tokens'][row, end - 1] == tokenizer.eos_id


def test_packing_pads_less_than_buckets_and_buckets_less_than_one_width(source, tokenizer, make):
    shares = []
    for fields in ({'batching': 'pack'}, {'batching': 'bucket'}, {'batching': 'bucket', 'bucket_boundaries': (1,)}):
        config, objective = make(**fields)
        shares.append(pipeline.TrainPipeline(source, tokenizer, objective, config, 0).padding_share)
    assert shares[0] < shares[1] < shares[2] and shares[0] < 0.12


def test_decoder_starts_with_the_named_symbol(source, tokenizer, make):
    for start, token in (('bos', tokenizer.bos_id), ('pad', tokenizer.pad_id)):
        config, objective = make(decoder_start=start, batching='bucket')
        train = pipeline.TrainPipeline(source, tokenizer, objective, config, 0)
        inputs = train.batch(0)['inputs']
        real = inputs['target_mask'][:, 0] == 1
        assert set(inputs['target_tokens'][real, 0].tolist()) == {token} and objective.decoder_start_id == token


def test_what_does_not_divide_over_the_hosts_is_refused(source, tokenizer, make):
    config, objective = make(evaluation_rows=6)
    with pytest.raises(errors.UserError, match='8 rows does not divide over 3 hosts; make data.row_multiple'):
        pipeline.TrainPipeline(source, tokenizer, objective, config, 0, 0, 3)
    with pytest.raises(errors.UserError, match='6 rows does not divide over 4 hosts; make data.evaluation_rows'):
        pipeline.EvaluationPipeline(source, tokenizer, objective, config, 0, 4)
    with pytest.raises(errors.UserError, match='process 2 of 2 does not exist'):
        pipeline.TrainPipeline(source, tokenizer, objective, config, 0, 2, 2)


def test_nothing_left_to_train_on_is_refused(tokenizer, make):
    config, objective = make()
    for examples in ([], [{'source': '', 'target': 'a'}]):
        with pytest.raises(errors.UserError, match='no .*examples'):
            pipeline.TrainPipeline(sources.ListSource(examples), tokenizer, objective, config, 0)


def test_unknown_objective_gets_the_nearest_name(tokenizer):
    with pytest.raises(errors.UserError, match="did you mean 'translation'"):
        objectives.make_objective(data_config.DataConfig(objective='translate'), tokenizer)
