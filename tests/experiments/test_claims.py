"""Claims are measured by the library's own functions, and their page says what was found."""

import importlib
import json
from pathlib import Path

import pytest

from experiments import claims
from experiments.claims import CLAIMS
from experiments.claims.finding import verdict
from experiments.claims.page import write_page


def test_every_file_of_the_folder_is_a_claim_on_the_page():
    helpers = {'__init__', '__main__', 'finding', 'page', 'timing', 'trained'}
    files = {path.stem for path in Path(claims.__file__).parent.glob('*.py')}
    assert files - helpers == set(CLAIMS)


@pytest.mark.parametrize(
    'name,words,held',
    [
        ('latent_cache', ['576 numbers a token', '2.25 groups'], 'holds here'),  # DeepSeek-V2, table 1
        ('ntk', ['82,685 at s = 8', '0.1250 times'], 'holds in part'),  # 10,000 x 8^(128 / 126)
        ('scale', ['64 keys'], 'holds here'),
    ],
)
def test_a_claim_finds_the_published_numbers(tmp_path, name, words, held):
    finding = importlib.import_module(f'experiments.claims.{name}').measure(str(tmp_path / 'figure.png'))
    assert all(word in finding.measured for word in words) and finding.verdict == held
    assert (tmp_path / 'figure.png').read_bytes().startswith(b'\x89PNG')


def test_a_verdict_holds_only_if_all_of_its_parts_do():
    assert [verdict(True, True), verdict(True, False), verdict(False, False)] == [
        'holds here', 'holds in part', 'does not hold here',
    ]  # fmt: skip


def test_the_page_has_what_was_measured_and_leaves_out_what_was_not(tmp_path):
    (tmp_path / 'figures').mkdir()
    values = {'claim': 'C.', 'measured': 'M 1.25.', 'verdict': 'holds here', 'seconds': 3.2, 'machine': 'an abacus'}
    (tmp_path / 'figures' / 'claim_scale.json').write_text(json.dumps(values))
    write_page(tmp_path)
    text = (tmp_path / 'claims.md').read_text()
    assert '| [scale](#scale) | holds here | 3 |' in text and '> C.' in text and 'M 1.25.' in text
    assert 'Machine: an abacus.' in text and '(figures/claim_scale.png)' in text and '[padding]' not in text
