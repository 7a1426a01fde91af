"""The small language of weight tables, against numbers written out by hand; B68, B69, B73 of the fault catalogue."""

import numpy as np
import pytest

from transformer_jax.huggingface.rearrange import Rearrange


def counting(*shape):
    return np.arange(np.prod(shape)).reshape(shape)


def test_heads_of_a_projection_lie_one_after_another_in_its_rows():
    theirs = counting(6, 2)  # 3 heads of width 2, model width 2
    (ours,) = Rearrange('(N H) D -> D N H').read(theirs, [(2, 3, 2)])
    for head in range(3):
        np.testing.assert_array_equal(ours[:, head], theirs[2 * head : 2 * head + 2].T)


def test_fused_projections_are_told_apart_by_the_place_of_the_fusion():
    theirs = counting(12, 1)  # 2 heads of width 2
    shapes = [(1, 2, 2)] * 3
    after_another = Rearrange('(q N H) D -> q D N H').read(theirs, shapes)
    by_head = Rearrange('(N q H) D -> q D N H').read(theirs, shapes)
    assert [query.ravel().tolist() for query in after_another] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [query.ravel().tolist() for query in by_head] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_a_kernel_with_an_axis_of_one_is_transposed_not_reshaped():
    (ours,) = Rearrange('C 1 L -> L C').read(counting(3, 1, 2), [(2, 3)])
    assert ours.tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize('spec, shapes', [
    ('D', [(5,)]),
    ('D F', [(2, 3)]),
    ('F D -> D F', [(2, 3)]),
    ('(N H) D -> D N H', [(5, 3, 2)]),
    ('D (N H) -> N H D', [(3, 2, 5)]),
    ('(N q H) -> q N H', [(3, 2)] * 3),
    ('(q F) D -> q D F', [(2, 7)] * 2),
    ('1 V -> V', [(4,)]),
])  # fmt: skip
def test_writing_is_the_inverse_of_reading(spec, shapes):
    rearrange = Rearrange(spec)
    theirs = counting(*rearrange.theirs_shape(shapes))
    ours = rearrange.read(theirs, shapes)
    assert [array.shape for array in ours] == [tuple(shape) for shape in shapes]
    np.testing.assert_array_equal(rearrange.write(ours), theirs)
