"""Texts and labelled texts from files, held in memory, with splits of their own where they are asked for."""

from __future__ import annotations

import gzip
import hashlib
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from transformer_jax import errors
from transformer_jax.data import config as data_config

TEXT, LABELLED = 'text:', 'labelled:'
_HERE = pathlib.Path(__file__).parent
EMBEDDED = {
    data_config.EMBEDDED_TEXT: f'{TEXT}{_HERE}/moby_dick/moby_dick.txt#split',
    data_config.EMBEDDED_LABELLED: f'{LABELLED}{_HERE}/sotu_era/sotu_era.tsv#split',
}
_TENTHS = {'train': range(8), 'valid': (8,), 'test': (9,)}
_BLANK_LINES = re.compile(r'\n(?:[ \t]*\n)+')


def is_texts(spec: str) -> bool:
    """Returns whether `spec` names texts or labelled texts."""
    return spec in EMBEDDED or spec.startswith((TEXT, LABELLED))


def read(spec: str, split: str) -> list[dict[str, Any]]:
    """Returns the examples which `sources.open_source` describes.

    Raises:
      UserError: for a missing, empty, undecodable or malformed file, an unknown option, or a split without examples.
    """
    path, _, tail = EMBEDDED.get(spec, spec).partition(':')[2].partition('#')
    labelled = EMBEDDED.get(spec, spec).startswith(LABELLED)
    options = dict(option.partition('=')[::2] for option in tail.split(',') if option)
    for name in options:
        errors.choose(f"option of '{spec}'", name, ('split',) if labelled else ('split', 'window'))
    text = _read_text(path)
    if labelled:
        examples, groups = _labelled(path, text)
    else:
        found = windows(text, _window(spec, options['window'])) if 'window' in options else paragraphs(text)
        examples, groups = [{'text': item} for item in found], None
    if 'split' in options:
        examples = share(examples, split, groups)
    if not examples:
        raise errors.UserError(f"'{spec}' has no text for split '{split}'; give a file with more examples")
    return examples


def _window(spec: str, given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise errors.UserError(f"'{spec}': window = '{given}' must be a whole number of at least 1")
    return int(given)


def _read_text(path: str) -> str:
    if not pathlib.Path(path).is_file():
        raise errors.UserError(f"'{path}' is not a file; give a text file, plain or .gz")
    content = pathlib.Path(path).read_bytes()
    try:
        if path.endswith('.gz'):
            content = gzip.decompress(content)
        text = content.decode('utf-8').removeprefix('\ufeff')
    except UnicodeDecodeError as error:
        raise errors.UserError(f"'{path}' is not UTF-8 at byte {error.start} ({error.reason}); convert it") from error
    except (OSError, EOFError) as error:
        raise errors.UserError(f"'{path}' is no intact .gz file ({error}); write it again") from error
    return text.replace('\r\n', '\n')


def paragraphs(text: str) -> list[str]:
    """Returns the stretches between blank lines, without the line breaks around them."""
    return [part for part in (part.strip('\n') for part in _BLANK_LINES.split(text)) if part.strip()]


def windows(text: str, size: int) -> list[str]:
    """Returns stretches of whole lines of at most `size` characters, which laid end to end are the text.

    A longer line is cut into stretches of its own.
    """
    found, current = [], ''
    for line in text.splitlines(keepends=True):
        if current and len(current) + len(line) > size:
            found.append(current)
            current = ''
        current += line
        while len(current) > size:
            found.append(current[:size])
            current = current[size:]
    return [*found, current] if current else found


def _labelled(path: str, text: str) -> tuple[list[dict[str, Any]], list[str]]:
    examples, groups = [], []
    for number, line in enumerate(text.removesuffix('\n').split('\n'), 1):
        columns = line.split('\t')
        if len(columns) not in (2, 3) or not columns[0].isdecimal() or not columns[1].strip():
            raise errors.UserError(
                f'{path}:{number} is not label, tab, text; a label is a whole number from 0, a third column the group'
            )
        examples.append({'label': int(columns[0]), 'text': columns[1]})
        groups.append(columns[-1])
    return examples, groups


def share(examples: Sequence[dict[str, Any]], split: str, groups: Sequence[str] | None) -> list[dict[str, Any]]:
    """Returns what belongs to `split`: eight tenths for 'train', one for 'valid', one for 'test'.

    Without groups these are stretches of the file in its order. With groups (for labelled texts the third column, else
    the text itself) the SHA-1 of its group says where an example belongs, so that a group is never divided.
    """
    if groups is None:
        tenths = [number * 10 // len(examples) for number in range(len(examples))]
    else:
        tenths = [int(hashlib.sha1(group.encode()).hexdigest(), 16) % 10 for group in groups]
    return [example for example, tenth in zip(examples, tenths, strict=True) if tenth in _TENTHS[split]]
