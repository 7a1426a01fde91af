"""Texts and labelled texts from files."""

import gzip

import pytest

from transformer_jax.data import sources, texts
from transformer_jax.errors import UserError

TEXT = 'first line\nsecond line\n\n \nother paragraph\n\n\nlast\n'


def _texts(spec, split='train'):
    return [example['text'] for example in sources.iterate(sources.open_source(spec, split))]


def test_blank_lines_part_paragraphs_plain_or_compressed(tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT)
    (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / 'dos.txt').write_bytes(TEXT.replace('\n', '\r\n').encode())
    for name in ('a.txt', 'a.txt.gz', 'dos.txt'):
        assert _texts(f'text:{tmp_path / name}') == ['first line\nsecond line', 'other paragraph', 'last']


@pytest.mark.parametrize('size', [1, 7, 12, 30, 1000])
def test_windows_laid_end_to_end_are_the_text(tmp_path, size):
    (tmp_path / 'a.txt').write_text(TEXT)
    found = _texts(f'text:{tmp_path / "a.txt"}#window={size}')
    assert ''.join(found) == TEXT and max(map(len, found)) <= size


def test_splits_of_one_file_are_disjoint_and_complete(tmp_path):
    (tmp_path / 'a.txt').write_text('\n\n'.join(f'paragraph {n}' for n in range(50)))
    parts = [_texts(f'text:{tmp_path / "a.txt"}#split', split) for split in ('train', 'valid', 'test')]
    assert [len(part) for part in parts] == [40, 5, 5]
    assert sum(parts, []) == [f'paragraph {n}' for n in range(50)]


def test_a_group_is_never_divided(tmp_path):
    rows = [(n % 3, f'sentence {n}', f'address {n % 40}') for n in range(400)]
    (tmp_path / 'a.tsv').write_text(''.join(f'{label}\t{text}\t{group}\n' for label, text, group in rows))
    group_of = {text: group for _, text, group in rows}
    parts = [_texts(f'labelled:{tmp_path / "a.tsv"}#split', split) for split in ('train', 'valid', 'test')]
    assert sorted(sum(parts, [])) == sorted(text for _, text, _ in rows)
    groups = [{group_of[text] for text in part} for part in parts]
    assert groups[0] & groups[1] == groups[0] & groups[2] == groups[1] & groups[2] == set()


@pytest.mark.parametrize('name', sorted(texts.EMBEDDED))
def test_embedded_texts_have_three_splits(name):
    sizes = [len(sources.open_source(name, split)) for split in ('train', 'valid', 'test')]
    assert sizes[0] > 4 * max(sizes[1:]) and min(sizes) > 50


@pytest.mark.parametrize(
    'content,spec,message',
    [
        (b'', 'text:{}', 'has no text for split'),
        (b'\xff\xfe', 'text:{}', 'is not UTF-8 at byte 0'),
        (b'a', 'text:{}#windw=3', "did you mean 'window'"),
        (b'a', 'text:{}#window=x', "window = 'x' must be a whole number"),
        (b'a', 'text:{}.txt', 'is not a file'),
        (b'one\tb\n', 'labelled:{}', ':1 is not label, tab, text'),
        (b'0\tb\n1\n', 'labelled:{}', ':2 is not label, tab, text'),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path, content, spec, message):
    path = tmp_path / 'file'
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        sources.open_source(spec.format(path))
    assert '\n' not in str(raised.value)


def test_a_cut_archive_and_an_exchange_of_sides_are_refused(tmp_path):
    (tmp_path / 'a.gz').write_bytes(gzip.compress(TEXT.encode())[:-9])
    with pytest.raises(UserError, match='no intact .gz'):
        sources.open_source(f'text:{tmp_path / "a.gz"}')
    with pytest.raises(UserError, match="'moby_dick' has no two sides"):
        sources.open_source('moby_dick', direction='reverse')
