"""Tokenizer files of a folder: held against the vocabulary of the model, and copied."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformer_jax.errors import UserError
from transformer_jax.huggingface.tensors import read_json

FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'vocab.json',
    'vocab.txt', 'merges.txt', 'tokenizer.model', 'spiece.model', 'sentencepiece.bpe.model', 'source.spm', 'target.spm',
)  # fmt: skip


def check_vocabulary(folder: Path, vocab_size: int):
    """Checks that no token id which the folder's tokenizer can give lies outside the model's vocabulary.

    Raises:
      UserError: naming the file, the largest id, and the vocabulary.
    """
    for name, largest in _largest_ids(folder):
        if largest >= vocab_size:
            raise UserError(f'{folder / name} has token id {largest}, but vocab_size is {vocab_size}')


def _largest_ids(folder: Path):
    if (folder / 'tokenizer.json').exists():
        fields = read_json(folder / 'tokenizer.json')
        vocabulary = (fields.get('model') or {}).get('vocab') or {}
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token['id'] for token in fields.get('added_tokens') or ()]
        yield 'tokenizer.json', max([*ids, *added], default=0)
    for name in ('vocab.json', 'added_tokens.json'):
        if (folder / name).exists():
            yield name, max(read_json(folder / name).values(), default=0)
    if (folder / 'vocab.txt').exists():
        yield 'vocab.txt', len((folder / 'vocab.txt').read_text(encoding='utf-8').splitlines()) - 1


def copy_tokenizer(source: Path, target: Path):
    """Copies the tokenizer files which `source` has."""
    for name in FILES:
        if (source / name).exists() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
