"""Pictures show what they are given, with every token named."""

import numpy as np

from transformer_jax.analysis.attention import AttentionMap, draw_attention
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


def test_curves_show_what_was_logged_and_leave_out_numbers_which_were_not_finite(tmp_path):
    lines = [{'step': n, 'train/loss': None if n == 2 else 5.0 / n, 'train/rate': 0.1 * n} for n in range(1, 5)]
    lines.append({'step': 4, 'valid/loss': 1.5})
    figure = draw_curves(lines, tmp_path / 'curves.png')
    assert [axes.get_title() for axes in figure.axes] == ['loss [nats a token]', 'learning rate']
    training, validation = figure.axes[0].lines
    assert list(training.get_xdata()) == [1, 3, 4] and list(validation.get_ydata()) == [1.5]


def test_a_run_without_numbers_still_has_a_picture(tmp_path):
    draw_curves([], tmp_path / 'curves.png')
    assert (tmp_path / 'curves.png').exists()
