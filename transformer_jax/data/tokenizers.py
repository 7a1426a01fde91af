"""SentencePiece vocabularies: a joint byte-pair encoding with byte fallback, trained here or given as a .model file."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
from etils import epath

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import sources

MODEL_FILE = 'tokenizer.model'
_ERRORS_ONLY = 2
_SETTINGS = {
    'model_type': 'bpe',
    'byte_fallback': True,
    'character_coverage': 0.9995,
    # Text goes in as it stands, so that it comes back as it stood.
    'normalization_rule_name': 'identity',
    'remove_extra_whitespaces': False,
    # One space goes in front, so that a word has the same pieces wherever it stands; decoding takes it off again.
    'add_dummy_prefix': True,
    'pad_id': 0,
    'eos_id': 1,
    'unk_id': 2,
    'bos_id': 3,
    # SentencePiece leaves out longer lines without a word; the limit is in bytes.
    'max_sentence_length': 1 << 24,
    'num_threads': 1,
}


class Tokenizer:
    """Text to ids and back.

    With a vocabulary trained here `decode(encode(text)) == text`, with one exception: the character U+2581, which
    SentencePiece itself uses as its mark of a space, comes back as a space. Nothing is normalised, and characters
    outside the vocabulary become bytes. Ids of control symbols never come out of `encode`, whatever the text says.

    Attributes:
      vocab_size: V, the number of ids.
      pad_id, eos_id, unk_id, bos_id: the special ids; bos_id is -1 where a given model has none.
      fingerprint: 16 hexadecimal digits which differ between vocabularies.
    """

    def __init__(self, model: bytes, name: str = 'tokenizer'):
        self._model, self._name = model, name
        self._processor = _processor(model, name)
        self.vocab_size = self._processor.vocab_size()
        self.pad_id, self.eos_id = self._processor.pad_id(), self._processor.eos_id()
        self.unk_id, self.bos_id = self._processor.unk_id(), self._processor.bos_id()
        for symbol, token in (('padding', self.pad_id), ('end of sentence', self.eos_id)):
            if token < 0:
                raise errors.UserError(f"'{name}' has no id for {symbol}; train it with pad_id and eos_id of 0 or more")
        self.fingerprint = hashlib.sha256(model).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without start and end marks."""
        return self._processor.encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of every text; `encode` for many, on all cores."""
        return self._processor.encode(list(texts), num_threads=os.cpu_count() or 1)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; control symbols give nothing, bytes which are no UTF-8 give U+FFFD.

        Raises:
          UserError: for an id outside the vocabulary.
        """
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise errors.UserError(f"id {token} is outside the vocabulary of {self.vocab_size} of '{self._name}'")
        return self._processor.decode(ids)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns what each id stands for, as a picture labels its axes."""
        return [self._processor.id_to_piece(int(token)) for token in ids]

    @functools.cached_property
    def ordinary_ids(self) -> np.ndarray:
        """The ids which stand for text: no control symbol, not the unknown id."""
        processor = self._processor
        return np.array([
            token for token in range(self.vocab_size)
            if not (processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token))
        ])  # fmt: skip

    def symbol(self, name: str) -> int:
        """Returns the id of a control symbol such as '<mask>'.

        Raises:
          UserError: when the vocabulary has none of this name.
        """
        token = self._processor.piece_to_id(name)
        if token == self.unk_id:
            raise errors.UserError(
                f"'{self._name}' has no symbol '{name}', which this data.objective needs; "
                'leave data.tokenizer empty to train a vocabulary which has it'
            )
        return token

    def save(self, path: str | os.PathLike) -> None:
        """Writes the SentencePiece model to `path`; a reader sees the whole file or none."""
        _write(pathlib.Path(path), self._model)

    def __getstate__(self) -> dict:
        return {'model': self._model, 'name': self._name}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)


def _processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise errors.UserError(f"'{name}' is not a SentencePiece model; give a .model file") from error
    return processor


def _write(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads a vocabulary from a .model file, or from a directory (such as a run's) which holds tokenizer.model.

    Raises:
      UserError: when there is none, or the file is no SentencePiece model.
    """
    file = epath.Path(path)  # buckets too (gs://)
    if file.is_dir():
        file = file / MODEL_FILE
    if not file.is_file():
        raise errors.UserError(
            f"there is no file '{file}'; give a SentencePiece .model file or a directory with {MODEL_FILE}"
        )
    return Tokenizer(file.read_bytes(), str(file))


def default_cache_directory() -> pathlib.Path:
    """Returns $XDG_CACHE_HOME/transformer_jax, or ~/.cache/transformer_jax."""
    return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache') / 'transformer_jax'


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    cache_directory: str | os.PathLike | None = None,
    symbols: Sequence[str] = (),
) -> Tokenizer:
    """Trains a byte-pair vocabulary (Sennrich et al. 2016) on `texts`, or takes it from the cache.

    The same texts give the same ids on every machine: training runs in one thread. A cached vocabulary is found by a
    hash of the texts, the settings and SentencePiece's version.

    Args:
      texts: the texts of the training split and of no other.
      vocab_size: V, special ids and 256 bytes included.
      cache_directory: where vocabularies are kept; None takes `default_cache_directory()`.
      symbols: further control symbols, which stand for no text.

    Raises:
      UserError: when `vocab_size` is larger or smaller than the texts allow, with the bound, or there are no texts.
    """
    texts = list(texts)
    if not any(texts):
        raise errors.UserError('there is no text to train a vocabulary on; give training examples, or a .model file')
    settings = {**_SETTINGS, 'vocab_size': vocab_size}
    if symbols:
        settings['control_symbols'] = list(symbols)
    digest = hashlib.sha256(repr((sorted(settings.items()), sentencepiece.__version__)).encode())
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, 'little'))
        digest.update(content)
    directory = pathlib.Path(cache_directory) if cache_directory is not None else default_cache_directory()
    path = directory / f'{digest.hexdigest()[:32]}.model'
    if path.is_file():
        return load_tokenizer(path)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, minloglevel=_ERRORS_ONLY, **settings
        )
    except RuntimeError as error:
        raise _too_large_or_small(vocab_size, str(error)) from error
    _write(path, model.getvalue())
    return load_tokenizer(path)


def _too_large_or_small(vocab_size: int, message: str) -> Exception:
    largest = re.search(r'value <= (\d+)', message)
    if largest:
        bound = f'is larger than the training text allows; the largest possible is {largest[1]}'
    elif needed := re.search(r'(\d+) vs (\d+)', message):
        bound = f'is too small for 256 bytes, 4 special ids and the characters of the text; give at least {needed[2]}'
    else:
        return RuntimeError(message)
    return errors.UserError(f'data.vocab_size = {vocab_size} {bound}')


def open_tokenizer(
    config: data_config.DataConfig, source: sources.Source, cache_directory: str | os.PathLike | None = None
) -> Tokenizer | None:
    """Loads the vocabulary which `config` names, or trains one on `source`, which has to be the training split.

    Of more than `config.vocab_examples` examples, as many are used at even distances. None where there are no words.

    Raises:
      UserError: as `load_tokenizer` and `train_tokenizer`.
    """
    if not data_config.FORMS[config.objective].words:
        return None
    if config.tokenizer:
        return load_tokenizer(config.tokenizer)
    count = min(len(source), config.vocab_examples)
    chosen = np.linspace(0, len(source), count, endpoint=False).astype(int)
    texts = [text for index in chosen for text in source[index].values() if isinstance(text, str)]
    symbols = data_config.FORMS[config.objective].symbols
    return train_tokenizer(texts, config.vocab_size, cache_directory, symbols)
