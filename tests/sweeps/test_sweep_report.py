"""The numbers of a report are those of scipy, numpy and sacreBLEU, and its pictures show them."""

import csv
import io
import re

import numpy as np
import pytest
import sacrebleu
import scipy.stats
from sacrebleu.significance import PairedTest
from sweep_parts import WORDS, fake_sweep, sweep_of, tiny_base

from transformer_jax.analysis.sweep_figures import Bar, Curve, draw_bars, draw_heat_map, draw_sweep_curves
from transformer_jax.errors import UserError
from transformer_jax.sweeps import tables
from transformer_jax.sweeps.report import publish, write_report
from transformer_jax.sweeps.results import read_results
from transformer_jax.sweeps.statistics import interval
from transformer_jax.training.significance import bootstrap_p_value

SEEDS = (0, 1, 2)
PERPLEXITIES = {
    'a': (10.0, 11.0, 12.5),
    'b': (9.0, 9.8, 11.9),
    'long_name': (10.5, 11.0, 12.1),
    'd': (30.0, 31.0, 32.6),
}
BLEUS = {'a': (5.0, 6.0, 5.5), 'b': (6.0, 6.2, 7.0), 'long_name': (5.0, 6.0, 5.6), 'd': (1.0, 0.5, 0.7)}


def translations(errors, count=8, seed=0):
    """Eight targets of the tiny validation split, of which each word is lost with probability `errors`."""
    random = np.random.default_rng(seed)
    rows = [[WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(2 + i % 5)][::-1] for i in range(count)]
    return [' '.join('oops' if random.random() < errors else word for word in row) for row in rows]


@pytest.fixture
def workdir(tmp_path):
    base = tiny_base(tmp_path)
    found = {
        name: {
            seed: (PERPLEXITIES[name][seed], BLEUS[name][seed], translations(0.1 * place, seed=seed)) for seed in SEEDS
        }
        for place, name in enumerate(PERPLEXITIES)
    }
    found['d'][1] = 'diverged'
    fake_sweep(tmp_path / 'sweep', base, sweep_of(*PERPLEXITIES), found)
    return tmp_path / 'sweep'


def test_an_interval_is_scipys_and_of_the_published_quantile():
    values = [3.0, 4.5, 4.0]
    found = interval(values)
    low, high = scipy.stats.t.interval(0.95, 2, loc=np.mean(values), scale=scipy.stats.sem(values))
    np.testing.assert_allclose([found.mean - found.half, found.mean + found.half], [low, high], rtol=1e-12)
    np.testing.assert_allclose(interval([-1.0, 0.0, 1.0]).half, 4.302653 / np.sqrt(3), rtol=1e-6)
    assert np.isnan(interval([1.0]).half) and np.isnan(interval([]).mean)


def test_differences_are_paired_by_seed_as_in_a_paired_t_test(workdir):
    arms = {arm.name: arm for arm in read_results(workdir).arms}
    for name in ('b', 'long_name'):
        expected = scipy.stats.ttest_rel(PERPLEXITIES[name], PERPLEXITIES['a'])
        low, high = expected.confidence_interval(0.95)
        found = arms[name].perplexity_difference
        np.testing.assert_allclose([found.mean - found.half, found.mean + found.half], [low, high])
        assert found.excludes_zero == (expected.pvalue < 0.05)
    unpaired = scipy.stats.ttest_ind(PERPLEXITIES['b'], PERPLEXITIES['a']).confidence_interval(0.95)
    assert unpaired.high - unpaired.low > 2 * 2 * arms['b'].perplexity_difference.half


def test_a_diverged_run_is_counted_and_its_seed_left_out_of_the_pairs(workdir):
    arm = read_results(workdir).arms[3]
    assert arm.diverged == 1 and len(arm.finished) == 2
    assert arm.perplexity.mean == np.mean([30.0, 32.6])
    assert arm.perplexity_difference.mean == np.mean([30.0 - 10.0, 32.6 - 12.5])


def test_the_p_value_is_sacrebleus_for_one_seed_and_repeating_a_seed_adds_no_evidence():
    references = translations(0.0, 40)
    old, new = translations(0.30, 40, 1), translations(0.25, 40, 2)
    metrics = {'BLEU': sacrebleu.BLEU()}
    expected = PairedTest([('old', old), ('new', new)], metrics, [references], 'bs', n_samples=1000)()[1]['BLEU'][1]
    found = bootstrap_p_value([old], [new], references)
    assert found == expected.p_value and 0.02 < found < 0.9
    assert bootstrap_p_value([old] * 3, [new] * 3, references) == found
    naive = PairedTest([('old', old * 3), ('new', new * 3)], metrics, [references * 3], 'bs', n_samples=1000)()[1]
    assert naive['BLEU'][1].p_value < found / 2
    assert bootstrap_p_value([old], [old], references) == 1.0


def test_the_csv_holds_every_number_and_the_tables_every_arm(workdir):
    results = read_results(workdir)
    rows = list(csv.DictReader(io.StringIO(tables.comma_separated(results))))
    assert [row['variant'] for row in rows] == list(PERPLEXITIES)
    for row, arm in zip(rows, results.arms, strict=True):
        assert float(row['perplexity']) == arm.perplexity.mean and float(row['bleu_interval']) == arm.bleu.half
        assert (row['finished'], row['diverged']) == (str(len(arm.finished)), str(arm.diverged))
    lines = tables.markdown(results).splitlines()
    assert len(lines) == 2 + 4 and len({line.count('|') for line in lines}) == 1
    mean, half = np.mean(PERPLEXITIES['b']), results.arms[1].perplexity.half
    assert f'| {mean:.2f} ± {half:.2f} |' in lines[3] and '| 3/3 | 0 |' in lines[3] and '| 2/3 | 1 |' in lines[5]
    latex = tables.latex(results)
    assert r'long\_name & 1,000' in latex and f'{mean:.2f} $\\pm$ {half:.2f}' in latex
    assert not re.search(r'(?<!\\)[_%#]', latex) and latex.count(r'\\') == 1 + 4


def test_the_verdict_follows_the_intervals(workdir):
    better, worse, open_ = tables.verdict(read_results(workdir))
    differences = np.array(PERPLEXITIES['b']) - PERPLEXITIES['a']
    assert scipy.stats.ttest_1samp(differences, 0).pvalue < 0.05 and differences.mean() < 0
    assert better == 'Lower perplexity than a: b.'
    assert worse == 'Higher perplexity than a: d.'
    assert open_ == 'No difference in perplexity which 3 seeds can show: long_name.'


def test_the_report_is_written_in_every_form(workdir):
    text = write_report(workdir)
    folder = workdir / 'report'
    assert sorted(path.name for path in folder.iterdir()) == [
        'bars.pdf', 'bars.png', 'curves.pdf', 'curves.png', 'report.md', 'table.csv', 'table.md', 'table.tex',
    ]  # fmt: skip
    assert (folder / 'report.md').read_text() == text
    assert (folder / 'table.md').read_text() in text and 'd, seed 1 diverged: NotFinite: loss' in text
    assert (folder / 'bars.pdf').read_bytes().startswith(b'%PDF') and '![bars](bars.png)' in text


def test_the_page_of_ablations_holds_every_published_report_with_its_figures_and_command(workdir, tmp_path):
    docs = tmp_path / 'docs'
    text = write_report(workdir)
    for _ in range(2):  # publishing again replaces the section
        page = publish(workdir, docs, 'an abacus')
    shown = page.read_text()
    assert shown.count('## Arms') == 1 and tables.markdown(read_results(workdir)) in shown
    assert '--sweep=arms --docs=docs --machine="an abacus"' in shown and 'Machine: an abacus.' in shown
    pictures = re.findall(r'\]\(([^)]*)\)', shown)
    assert pictures == ['ablations/arms/curves.png', 'ablations/arms/bars.png']
    assert all((docs / picture).is_file() for picture in pictures) and text.split('\n', 1)[1] in shown.replace(
        'ablations/arms/', ''
    )


def test_an_unfinished_sweep_says_what_is_missing(tmp_path):
    base, found = tiny_base(tmp_path), {'a': {0: (9.0, 1.0, translations(0.0)), 1: None}, 'b': {0: None, 1: None}}
    fake_sweep(tmp_path / 'sweep', base, sweep_of('a', 'b', seeds=(0, 1)), found)
    text = write_report(tmp_path / 'sweep')
    assert '3 of 4 runs have not ended yet' in text and 'Fewer seeds done than an interval needs: b.' in text
    empty = {name: {0: None, 1: None} for name in 'ab'}
    fake_sweep(tmp_path / 'empty', base, sweep_of('a', 'b', seeds=(0, 1)), empty)
    with pytest.raises(UserError, match='no run of the sweep'):
        write_report(tmp_path / 'empty')
    with pytest.raises(UserError, match='give the workdir of a sweep'):
        write_report(tmp_path)


def test_pictures_show_means_intervals_and_seeds(tmp_path):
    curve = Curve('a', (((1, 5.0), (2, 3.0), (4, 2.0)), ((1, 7.0), (2, 4.0), (4, 3.0))))
    axes = draw_sweep_curves('title', [curve, curve], tmp_path / 'curves').axes[0]
    assert list(axes.lines[0].get_ydata()) == [6.0, 3.5, 2.5]
    band = axes.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band} >= {(4.0, 2.0), (4.0, 3.0), (1.0, 7.0)}
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == len(axes.lines) == 2
    bars = [Bar('a', 2.0, 0.5, (1.8, 2.2), True), Bar('b', 4.0, float('nan'), (4.0,), False)]
    axes = draw_bars('title', {'loss': bars}, tmp_path / 'bars').axes[0]
    assert [patch.get_width() for patch in axes.patches] == [2.0, 4.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ['a (baseline)', 'b']
    assert axes.get_xlim()[0] <= 1.5 and axes.get_xlim()[1] > 4.0
    cells = {('post', 0.1): (3.0, '3.0'), ('post', 0.2): (float('nan'), '3 of 3\ndiverged'), ('pre', 0.1): (2.0, '2.0'),
             ('pre', 0.2): (2.5, '2.5')}  # fmt: skip
    axes = draw_heat_map('title', 'norm', 'rate', cells, 'perplexity', tmp_path / 'map').axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array().filled(np.nan), [[3.0, np.nan], [2.0, 2.5]])
    assert {text.get_text() for text in axes.texts} == {text for _, text in cells.values()}
