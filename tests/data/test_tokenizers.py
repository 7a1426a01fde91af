import multiprocessing
import pickle

import numpy as np
import pytest
import sentencepiece

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import objectives, sources, tokenizers

HARD_TEXTS = [
    '…', 'ﬁ', 'Hello:World', ' a', 'a  b', 'a ', '   ', '', 'café ✓', 'cafe\u0301', '日本語 \U0001f600',
    'a\tb\nc', '\x00', '<pad></s><unk><s>', '<0x41>', '½ ① Ａ',
]  # fmt: skip


def test_decoding_gives_every_text_back(tokenizer, source):
    valid = sources.open_source('soft.en-de', 'valid', limit=200)
    texts = [text for pair in sources.iterate(valid) for text in pair.values()] + HARD_TEXTS
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.decode(tokenizer.encode('a\u2581b')) == 'a b'  # the documented exception


def test_text_never_becomes_a_control_id(tokenizer):
    controls = {tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.bos_id}
    assert controls == {0, 1, 2, 3}
    for text in HARD_TEXTS:
        assert not controls & set(tokenizer.encode(text))
    # What the model gives back around its sentence is no text.
    assert tokenizer.decode([3, *tokenizer.encode('Hello'), 1, 0, 0]) == 'Hello'
    assert tokenizer.decode(np.array(tokenizer.encode('Hello'), np.int32)) == 'Hello'


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(errors.UserError, match='outside the vocabulary of 1000'):
            tokenizer.decode([5, token])


def test_joint_vocabulary_has_the_size_asked_and_pieces_of_both_languages(tokenizer):
    assert tokenizer.vocab_size == 1000
    pieces = set(tokenizer.pieces(range(1000)))
    assert '▁the' in pieces and '▁die' in pieces and '<0xFF>' in pieces


def test_cache_is_found_by_content_and_settings(source, tokenizer, tmp_path):
    texts = [pair['source'] for pair in sources.iterate(source)]
    first = tokenizers.train_tokenizer(texts, 600, tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    assert tokenizers.train_tokenizer(iter(texts), 600, tmp_path).fingerprint == first.fingerprint
    assert file.stat().st_mtime_ns == written and len(list(tmp_path.iterdir())) == 1
    tokenizers.train_tokenizer(texts, 601, tmp_path)
    tokenizers.train_tokenizer([*texts[:-1], texts[-1] + '!'], 600, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    again = tokenizers.train_tokenizer(texts, 600, tmp_path / 'elsewhere')
    assert again.fingerprint == first.fingerprint  # trained twice, the same


def test_vocabulary_is_trained_on_the_training_split_alone(source, cache_directory, tokenizer):
    texts = [text for pair in sources.iterate(source) for text in pair.values()]
    assert tokenizers.train_tokenizer(texts, 1000, cache_directory).fingerprint == tokenizer.fingerprint


def test_saved_vocabulary_comes_back_from_file_run_directory_and_pickle(tokenizer, tmp_path):
    tokenizer.save(tmp_path / 'run' / tokenizers.MODEL_FILE)
    for back in (
        tokenizers.load_tokenizer(tmp_path / 'run'),
        tokenizers.load_tokenizer(tmp_path / 'run' / 'tokenizer.model'),
        tokenizers.open_tokenizer(data_config.DataConfig(tokenizer=str(tmp_path / 'run')), None),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert back.fingerprint == tokenizer.fingerprint and back.encode('Hello World') == tokenizer.encode(
            'Hello World'
        )
    assert [path.name for path in (tmp_path / 'run').iterdir()] == ['tokenizer.model']


@pytest.mark.parametrize(
    'texts, size, message',
    [
        (['a b'], 8000, 'data.vocab_size = 8000 is larger than .* largest possible is 26[0-9]'),
        (['abc'], 100, 'data.vocab_size = 100 is too small .* at least 264'),
        (['', ''], 300, 'no text'),
        ([], 300, 'no text'),
    ],
)
def test_vocabulary_which_the_texts_do_not_allow_is_refused(texts, size, message, tmp_path):
    with pytest.raises(errors.UserError, match=message) as caught:
        tokenizers.train_tokenizer(texts, size, tmp_path)
    assert '\n' not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_largest_possible_size_is_possible(tmp_path):
    with pytest.raises(errors.UserError) as caught:
        tokenizers.train_tokenizer(['hello world', 'hello'], 8000, tmp_path)
    largest = int(str(caught.value).split()[-1])
    assert tokenizers.train_tokenizer(['hello world', 'hello'], largest, tmp_path).vocab_size == largest


def test_missing_and_broken_models_are_refused(tmp_path):
    with pytest.raises(errors.UserError, match='there is no file'):
        tokenizers.load_tokenizer(tmp_path)
    (tmp_path / 'tokenizer.model').write_bytes(b'text')
    with pytest.raises(errors.UserError, match='is not a SentencePiece model'):
        tokenizers.load_tokenizer(tmp_path)


def test_given_model_without_a_start_id_needs_decoder_start_pad(tmp_path, source):
    prefix = tmp_path / 'given'
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(pair['source'] for pair in sources.iterate(source)), model_prefix=str(prefix),
        vocab_size=200, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    given = tokenizers.load_tokenizer(f'{prefix}.model')
    with pytest.raises(errors.UserError, match="choose data.decoder_start='pad'"):
        objectives.make_objective(data_config.DataConfig(), given)
    objective = objectives.make_objective(data_config.DataConfig(decoder_start='pad'), given)
    assert objective.decoder_start_id == 0


def _train(directory):
    return tokenizers.train_tokenizer(['one two three', 'four five six'] * 3, 275, directory).fingerprint


def test_processes_which_train_at_once_agree(tmp_path):
    with multiprocessing.get_context('spawn').Pool(2) as pool:
        assert len(set(pool.map(_train, [tmp_path] * 4))) == 1
    assert len(list(tmp_path.iterdir())) == 1
