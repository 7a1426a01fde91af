"""Every family against transformers, on tiny random models: outputs, gradients, and the way there and back."""

import pytest

pytest.importorskip('torch')
pytest.importorskip('transformers')

from benchmarks.parity import BAR, CASES, RELATIVE_BAR, measure, round_trip  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    return {case.name: tmp_path_factory.mktemp('theirs') for case in CASES}


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_transformers(case, folders):
    difference, *_ = measure(case.name, folders[case.name])
    assert not difference.first, f'the first layer which differs is {difference.first}: {difference}'
    assert difference.hidden <= BAR and difference.attention <= BAR and difference.logits <= BAR, difference
    assert difference.loss <= RELATIVE_BAR and difference.gradient <= RELATIVE_BAR, difference


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_what_we_export_transformers_loads_and_we_read_back_bit_for_bit(case, folders, tmp_path):
    _, *run = measure(case.name, folders[case.name])
    assert round_trip(case, *run, tmp_path) <= 1e-6
