"""What experiments consist of changes only where a change says so."""

import json

from tests.golden import pods
from tests.golden.write import GOLDEN, texts


def test_configs_and_sweeps_are_those_of_the_golden_files():
    kept = {path.name: path.read_text() for path in GOLDEN.glob('*.txt')}
    made = texts()
    assert sorted(kept) == sorted(made), 'a config or a sweep came or went: python -m tests.golden.write'
    for name, text in made.items():
        assert text == kept[name], f'{name} has changed; if that is meant: python -m tests.golden.write'


def test_the_page_of_compiled_programs_has_the_golden_figures():
    assert pods.tables(json.loads(pods.GOLDEN.read_text())) in pods.PAGE.read_text()
