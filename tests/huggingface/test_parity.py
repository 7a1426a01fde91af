"""Every family against transformers, on tiny random models: outputs, gradients, and the way there and back."""

import jax
import numpy as np
import pytest

pytest.importorskip('torch')
pytest.importorskip('transformers')

from benchmarks.parity import (  # noqa: E402
    BAR,
    CASES,
    RELATIVE_BAR,
    compare,
    measure,
    round_trip,
    run_ours,
    run_theirs,
)

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


def test_a_mismatch_names_the_first_layer_which_differs(folders):
    difference, theirs, model, params, inputs = measure('llama', folders['llama'])
    case = CASES[0]
    their_out, *_ = run_theirs(case, theirs, inputs, None)
    params = jax.tree.map(np.copy, params)
    params['decoder']['layers']['block_0']['ffn_residual']['in_norm']['scale'][1] += 0.1
    ours, *_ = run_ours(model, params, inputs, None)
    assert compare(case, their_out, ours, inputs).first == 'hiddens[2] (after layer 1)'
