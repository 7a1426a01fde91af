import numpy as np
import pytest

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import planner

WIDTHS = (24, 20)


def _config(batching, **fields):
    return data_config.DataConfig(
        **{
            'batching': batching,
            'source_length': WIDTHS[0],
            'target_length': WIDTHS[1],
            'batch_tokens': 8 * sum(WIDTHS),
            'row_multiple': 4,
            'bucket_boundaries': (6, 12) if batching == 'bucket' else (),
            **fields,
        }
    )


def _lengths(count=100, seed=0):
    return np.random.default_rng(seed).integers(2, 15, (count, 2))


def _planner(batching, lengths=None, seed=0, **fields):
    return planner.Planner(_lengths() if lengths is None else lengths, WIDTHS, _config(batching, **fields), seed)


def _ids(plan, epoch):
    return np.concatenate([plan.batch(epoch * plan.steps_per_epoch + i).examples for i in range(plan.steps_per_epoch)])


both = pytest.mark.parametrize('batching', ['pack', 'bucket'])


@both
def test_each_example_comes_once_an_epoch_and_every_epoch_in_another_order(batching):
    plan = _planner(batching)
    orders = [_ids(plan, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(100))
    assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[1], orders[2])
    assert not np.array_equal(orders[0], _ids(_planner(batching, seed=1), 0))


@both
def test_a_step_is_the_same_alone_as_after_all_steps_before_it(batching):
    straight = _planner(batching)
    steps = 3 * straight.steps_per_epoch
    plans = [straight.batch(step) for step in range(steps)]
    for step in (0, straight.steps_per_epoch, steps - 1):
        alone = _planner(batching).batch(step)
        np.testing.assert_array_equal(alone.examples, plans[step].examples)
        np.testing.assert_array_equal(alone.offsets, plans[step].offsets)
        assert (alone.epoch, alone.widths) == (plans[step].epoch, plans[step].widths)
        assert alone.epoch == step // straight.steps_per_epoch
    # Steps asked for in any order, as threads do around the end of an epoch.
    for step in (steps - 1, 0, straight.steps_per_epoch, 1):
        np.testing.assert_array_equal(straight.batch(step).examples, plans[step].examples)


@both
def test_rows_hold_what_fits_and_batches_stay_within_their_tokens(batching):
    lengths = _lengths()
    plan = _planner(batching, lengths)
    shapes = set()
    for step in range(2 * plan.steps_per_epoch):
        batch = plan.batch(step)
        rows = len(batch.offsets) - 1
        shapes.add((rows, batch.widths))
        assert rows % 4 == 0 and rows * sum(batch.widths) <= 8 * sum(WIDTHS)
        for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            assert (lengths[batch.examples[start:stop]].sum(axis=0) <= batch.widths).all()
    assert shapes == ({(8, WIDTHS)} if batching == 'pack' else {(28, (6, 6)), (12, (12, 12)), (8, WIDTHS)})


@both
def test_rows_left_over_are_spread_over_the_batches_of_their_shape(batching):
    plan = _planner(batching)
    filled = {}
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        filled.setdefault(batch.widths, []).append(int((np.diff(batch.offsets) > 0).sum()))
    for counts in filled.values():
        assert max(counts) - min(counts) <= 1


@both
@pytest.mark.parametrize('hosts', [1, 2, 4])
def test_hosts_read_disjoint_rows_which_join_to_the_global_batch(batching, hosts):
    plan = _planner(batching)
    for step in range(plan.steps_per_epoch):
        whole = plan.batch(step)
        parts = [whole.part(host, hosts) for host in range(hosts)]
        np.testing.assert_array_equal(np.concatenate([part.examples for part in parts]), whole.examples)
        np.testing.assert_array_equal(np.concatenate([np.diff(part.offsets) for part in parts]), np.diff(whole.offsets))
        assert {len(part.offsets) - 1 for part in parts} == {(len(whole.offsets) - 1) // hosts}


def test_an_example_goes_to_the_first_bucket_which_holds_both_sides():
    lengths = np.array([[6, 6], [7, 2], [2, 7], [12, 12], [13, 2], [24, 20]])
    plan = _planner('bucket', lengths)
    widths = {}
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        widths |= {int(example): batch.widths for example in batch.examples}
    assert widths == {0: (6, 6), 1: (12, 12), 2: (12, 12), 3: (12, 12), 4: WIDTHS, 5: WIDTHS}


def test_buckets_double_unless_they_are_given():
    lengths = np.array([[3, 3], [17, 3], [33, 3], [70, 70]])
    config = _config('bucket', source_length=70, target_length=70, bucket_boundaries=(), batch_tokens=10_000)
    plan = planner.Planner(lengths, (70, 70), config, 0)
    assert [group.widths for group in plan.groups] == [(16, 16), (32, 32), (64, 64), (70, 70)]
    assert [group.rows for group in plan.groups] == [312, 156, 76, 68]


def test_packed_neighbours_change_from_epoch_to_epoch():
    plan = _planner('pack', np.full((100, 2), 5))

    def neighbours(epoch):
        rows = [np.split(batch.examples, batch.offsets[1:-1]) for batch in plan.epoch(epoch)]
        return {frozenset(row.tolist()) for batch in rows for row in batch if len(row)}

    assert neighbours(0) != neighbours(1)
    assert all(len(row) == 4 for row in neighbours(0))


def test_pack_limit_bounds_the_pairs_of_a_row():
    plan = _planner('pack', np.full((100, 2), 2), pack_limit=3)
    counts = np.concatenate([np.diff(plan.batch(step).offsets) for step in range(plan.steps_per_epoch)])
    assert counts.max() == 3 and counts.sum() == 100
    free = _planner('pack', np.full((100, 2), 2))
    assert max(np.diff(free.batch(step).offsets).max() for step in range(free.steps_per_epoch)) == 10


@both
def test_padding_share_is_that_of_the_rows_counted_one_by_one(batching):
    lengths = _lengths()
    plan = _planner(batching, lengths)
    slots = tokens = 0
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        slots += (len(batch.offsets) - 1) * sum(batch.widths)
        tokens += lengths[batch.examples].sum()
    assert plan.padding_share == pytest.approx(1 - tokens / slots, abs=1e-12)


def test_no_examples_are_refused():
    with pytest.raises(errors.UserError, match='no training examples'):
        _planner('pack', np.zeros((0, 2), np.int64))


def test_rows_of_a_batch_and_order_of_batches_change_even_where_no_two_lengths_are_alike():
    lengths = np.array([[a, b] for a in range(2, 13) for b in range(2, 13)])
    plan = _planner('bucket', lengths, batch_tokens=4 * sum(WIDTHS))

    def batches(epoch):
        return [(batch.widths, frozenset(batch.examples.tolist())) for batch in plan.epoch(epoch)]

    assert not set(batches(0)) & set(batches(1))
    assert [widths for widths, _ in batches(0)] != [widths for widths, _ in batches(1)]


def test_packing_fills_nearly_every_row():
    lengths = np.random.default_rng(0).integers(2, 15, (2000, 1)).repeat(2, axis=1)
    config = _config('pack', target_length=24, row_multiple=1, batch_tokens=48)
    assert planner.Planner(lengths, (24, 24), config, 0).padding_share < 0.003
