"""Pictures show what they are given, with every token named."""

import html.parser
import json
import re
import warnings

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from transformer_jax.analysis import figure as figures
from transformer_jax.analysis.attention import AttentionMap, draw_attention, head_maps
from transformer_jax.analysis.attention_html import attention_html, write_attention_html
from transformer_jax.analysis.curves import draw_curves


def test_an_attention_map_names_every_token_and_shows_the_weights_as_they_are(tmp_path):
    weights = np.random.default_rng(0).random((3, 4)).astype(np.float32)
    rows, columns = ['▁Preis', '$', '</s>'], ['▁a', '▁b', '▁c', '</s>']
    figure = draw_attention([AttentionMap('head 1', weights, rows, columns)] * 5, tmp_path / 'map.png')
    assert (tmp_path / 'map.png').stat().st_size > 1000
    shown = [axes for axes in figure.axes if axes.axison]
    assert len(shown) == 5
    assert [label.get_text() for label in shown[0].get_yticklabels()] == ['▁Preis', r'\$', '</s>']
    assert [label.get_text() for label in shown[0].get_xticklabels()] == columns
    np.testing.assert_array_equal(shown[0].images[0].get_array(), weights)
    assert f'darkest: {weights.max():.2f}' in shown[0].get_title()
    assert (shown[0].get_ylabel(), shown[0].get_xlabel()) == ('target tokens', 'source tokens')


def test_maps_of_heads_are_the_weights_of_each_layer_and_head_without_padding():
    weights = np.random.default_rng(0).random((2, 3, 5, 6)).astype(np.float32)
    maps = head_maps(list(weights), ['a', 'b'], ['c', 'd', 'e'], row_axis='queries', column_axis='keys')
    assert [each.title for each in maps] == [f'layer {i}, head {j}' for i in (1, 2) for j in (1, 2, 3)]
    np.testing.assert_array_equal(maps[4].weights, weights[1, 1, :2, :3])
    assert maps[0].row_axis == 'queries' and maps[0].column_axis == 'keys'
    with pytest.raises(ValueError, match='more than weights of shape'):
        head_maps(list(weights), list('abcdef'), ['c'])


def make_font(path, name, characters):
    """Writes a TrueType font which has these characters, each a square."""
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    for corner in ((100, 700), (800, 700), (800, 0)):
        pen.lineTo(corner)
    pen.closePath()
    glyphs = ['.notdef', *(f'g{ord(character)}' for character in characters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(glyphs)
    builder.setupCharacterMap({ord(character): f'g{ord(character)}' for character in characters})
    builder.setupGlyf(dict.fromkeys(glyphs, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(glyphs, (1000, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({'familyName': name, 'styleName': 'Regular'})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def test_tokens_in_chinese_are_drawn_in_a_font_which_has_them_and_none_is_missed_in_silence(
    tmp_path, monkeypatch, caplog
):
    make_font(tmp_path / 'wide.ttf', 'Wide Test Font', '注意力')
    monkeypatch.setattr(font_manager.fontManager, 'ttflist', list(font_manager.fontManager.ttflist))
    monkeypatch.setattr(figures, 'WIDE_FONTS', ('Absent Font', 'Wide Test Font'))
    maps = [AttentionMap('head 1', np.eye(2, dtype=np.float32), ['▁注意', '力'], ['attention', '</s>'])]
    assert figures.label_fonts(maps[0].rows) == ['DejaVu Sans'] and '力意注' in caplog.text
    caplog.clear()
    font_manager.fontManager.addfont(str(tmp_path / 'wide.ttf'))
    assert figures.label_fonts(maps[0].rows) == ['DejaVu Sans', 'Wide Test Font']
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        figure = draw_attention(maps, tmp_path / 'map.png')
    assert figure.axes[0].get_yticklabels()[0].get_text() == '▁注意' and not caplog.records


def test_the_page_is_one_file_with_every_weight_and_token_and_asks_nothing_of_a_network(tmp_path):
    weights = np.random.default_rng(0).random((2, 3)).astype(np.float32)
    maps = [AttentionMap(f'head {n}', weights, ['</script><b>', '注意'], ['a', '"', '&']) for n in (1, 2)]
    write_attention_html(maps, tmp_path / 'map.html', 'A <title>')
    page = (tmp_path / 'map.html').read_text(encoding='utf-8')
    assert page == attention_html(maps, 'A <title>')

    class Tags(html.parser.HTMLParser):
        seen = []

        def handle_starttag(self, tag, attributes):
            self.seen.append((tag, dict(attributes)))

    Tags().feed(page)
    assert [tag for tag, _ in Tags.seen].count('script') == 1 and 'b' not in [tag for tag, _ in Tags.seen]
    assert not any(name in ('src', 'href') for _, attributes in Tags.seen for name in attributes)
    assert 'http' not in page and 'A &lt;title&gt;' in page
    data = json.loads(re.search(r'const maps = (.*);\n', page)[1])
    assert [each['title'] for each in data] == ['head 1', 'head 2'] and data[0]['rows'] == maps[0].rows
    np.testing.assert_allclose(data[1]['weights'], weights, atol=5e-5)


def test_curves_show_what_was_logged_and_leave_out_numbers_which_were_not_finite(tmp_path):
    lines = [{'step': n, 'train/loss': None if n == 2 else 5.0 / n, 'train/rate': 0.1 * n} for n in range(1, 5)]
    lines.append({'step': 4, 'valid/loss': 1.5})
    figure = draw_curves(lines, tmp_path / 'curves.png')
    assert [axes.get_title() for axes in figure.axes] == ['loss [nats]', 'learning rate']
    training, validation = figure.axes[0].lines
    assert list(training.get_xdata()) == [1, 3, 4] and list(validation.get_ydata()) == [1.5]


def test_a_run_without_numbers_still_has_a_picture(tmp_path):
    draw_curves([], tmp_path / 'curves.png')
    assert (tmp_path / 'curves.png').exists()
