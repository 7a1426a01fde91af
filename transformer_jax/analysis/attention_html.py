"""Attention weights as a page to point at: one file, which needs nothing else and no network."""

from __future__ import annotations

import html
import json
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from transformer_jax.analysis.attention import AttentionMap


def attention_html(maps: Sequence[AttentionMap], title: str = 'Attention') -> str:
    """Returns a page in which one chooses a map and points at a token to see where it looks, with numbers.

    The page holds weights, tokens, style and script; `IPython.display.HTML` shows it in a notebook too. Weights are
    rounded to four places.

    Raises:
      ValueError: if there are no maps.
    """
    if not maps:
        raise ValueError('there is no map to show')
    data = [
        {
            'title': each.title,
            'weights': np.round(np.asarray(each.weights, np.float64), 4).tolist(),
            'rows': list(each.rows),
            'columns': list(each.columns),
            'rowAxis': each.row_axis,
            'columnAxis': each.column_axis,
        }
        for each in maps
    ]
    # A token may hold '</script>', which would end the script.
    text = json.dumps(data, ensure_ascii=False).replace('<', '\\u003c')
    return _PAGE.substitute(title=html.escape(title), data=text)


def write_attention_html(maps: Sequence[AttentionMap], path: Path, title: str = 'Attention') -> None:
    """Writes the page of `attention_html` as a file."""
    Path(path).write_text(attention_html(maps, title), encoding='utf-8')


_PAGE = string.Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<style>
.attention { font: 14px/1.3 system-ui, "Noto Sans CJK SC", "Noto Sans CJK JP", sans-serif; color: #111;
  background: #fff; padding: 8px; display: inline-block }
.attention table { border-collapse: collapse; margin-top: 8px }
.attention td { width: 22px; height: 22px; min-width: 22px; border: 1px solid #eee; font-size: 9px; text-align: center }
.attention th { font-weight: normal; padding: 1px 4px; text-align: right; white-space: nowrap; cursor: pointer }
.attention thead th { vertical-align: bottom; text-align: left; writing-mode: vertical-rl; transform: rotate(180deg) }
.attention .on { background: #ffe08a }
.attention .axis { color: #555; font-size: 12px }
</style></head><body><div class="attention">
<label>$title: <select></select></label> <span class="axis"></span>
<table></table><div class="axis told">Point at a token or a cell.</div>
</div>
<script>
(() => {
  const maps = $data;
  const all = document.querySelectorAll('.attention'), root = all[all.length - 1];
  const select = root.querySelector('select'), table = root.querySelector('table'), told = root.querySelector('.told');
  maps.forEach((map, i) => select.add(new Option(map.title, i)));
  const cell = (row, kind, text) => {
    const made = document.createElement(kind); made.textContent = text; row.append(made); return made;
  };
  const show = () => {
    const map = maps[select.value], most = Math.max(...map.weights.flat(), 1e-9);
    root.querySelector('.axis').textContent = 'rows: ' + map.rowAxis + ', columns: ' + map.columnAxis;
    table.replaceChildren();
    const top = table.createTHead().insertRow(), heads = [], sides = [], cells = [];
    cell(top, 'th', '');
    map.columns.forEach(token => heads.push(cell(top, 'th', token)));
    const body = table.createTBody();
    map.rows.forEach((token, r) => {
      const row = body.insertRow();
      sides.push(cell(row, 'th', token));
      cells.push(map.columns.map((_, c) => {
        const made = cell(row, 'td', '');
        made.style.background = 'rgba(8, 81, 156, ' + map.weights[r][c] / most + ')';
        return made;
      }));
    });
    const clear = () => {
      [...heads, ...sides].forEach(head => { head.className = ''; head.style.background = '' });
      cells.flat().forEach(one => one.textContent = '');
    };
    const percent = weight => (100 * weight).toFixed(0);
    const point = (r, c) => {
      clear();
      if (r !== null) {
        sides[r].className = 'on';
        map.weights[r].forEach((weight, i) => {
          cells[r][i].textContent = percent(weight);
          cells[r][i].style.color = weight > most / 2 ? '#fff' : '#111';
          heads[i].style.background = 'rgba(255, 170, 0, ' + weight / most + ')';
        });
      }
      if (c !== null) {
        heads[c].className = 'on';
        if (r === null) map.weights.forEach((weights, i) => {
          cells[i][c].textContent = percent(weights[c]);
          cells[i][c].style.color = weights[c] > most / 2 ? '#fff' : '#111';
          sides[i].style.background = 'rgba(255, 170, 0, ' + weights[c] / most + ')';
        });
      }
      told.textContent = r !== null && c !== null
        ? map.rows[r] + ' \\u2192 ' + map.columns[c] + ': ' + map.weights[r][c].toFixed(4)
        : 'numbers are percent';
    };
    sides.forEach((head, r) => head.onmouseenter = () => point(r, null));
    heads.forEach((head, c) => head.onmouseenter = () => point(null, c));
    cells.forEach((row, r) => row.forEach((one, c) => one.onmouseenter = () => point(r, c)));
  };
  select.onchange = show;
  show();
})();
</script></body></html>
""")
