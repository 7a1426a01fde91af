"""The one place where matplotlib is imported, when the first figure is drawn and never before."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

_log = logging.getLogger(__name__)

# Fonts with Chinese, Japanese or Korean, most complete first, as Linux, macOS and Windows have them.
WIDE_FONTS = (
    'Noto Sans CJK JP', 'Noto Sans CJK SC', 'Noto Sans CJK KR', 'Noto Sans JP', 'Noto Sans SC', 'Noto Sans KR',
    'Source Han Sans', 'WenQuanYi Zen Hei', 'WenQuanYi Micro Hei', 'Droid Sans Fallback', 'IPAexGothic', 'IPAGothic',
    'NanumGothic', 'Unifont', 'Hiragino Sans', 'PingFang SC', 'Apple SD Gothic Neo', 'Arial Unicode MS', 'Yu Gothic',
    'Microsoft YaHei', 'Malgun Gothic',
)  # fmt: skip


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure of the given inches, on the canvas that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    return figure


def label_fonts(labels: Iterable[str]) -> list[str]:
    """Returns names of fonts of this machine which together have every character of `labels`, matplotlib's own first.

    Characters which no known font has are told in one warning; they are drawn as boxes.
    """
    from matplotlib import font_manager, rcParams
    from matplotlib.ft2font import FT2Font

    missing = {ord(character) for label in labels for character in label if character.isprintable()}
    chosen: list[str] = []
    installed = {font.name: font.fname for font in font_manager.fontManager.ttflist if font.style == 'normal'}
    for name in (*rcParams['font.sans-serif'][:1], *WIDE_FONTS):
        if missing and name in installed:
            left = missing - FT2Font(installed[name]).get_charmap().keys()
            if left != missing or not chosen:
                chosen.append(name)
            missing = left
    if missing:
        shown = ''.join(map(chr, sorted(missing)[:20]))
        _log.warning('no font here has %s; install one which has (Noto Sans CJK, say) to see these tokens', shown)
    return chosen
