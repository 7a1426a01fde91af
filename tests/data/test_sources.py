import importlib.util
import pathlib
import sys
import textwrap

import pytest

from transformer_jax import errors
from transformer_jax.data import config as data_config
from transformer_jax.data import sources


def _write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_embedded_splits_hold_the_stated_pairs_and_share_no_source():
    splits = {name: sources.open_source('soft.en-de', name) for name in data_config.SPLITS}
    assert {name: len(split) for name, split in splits.items()} == {'train': 26485, 'valid': 1000, 'test': 1000}
    texts = {name: {example['source'] for example in sources.iterate(split)} for name, split in splits.items()}
    assert not texts['train'] & texts['valid'] and not texts['train'] & texts['test']
    assert not texts['valid'] & texts['test']
    assert splits['train'][0] == {'source': 'Exit from Print Preview.', 'target': 'Beendet die Druckvorschau.'}
    assert splits['train'].languages == ('en', 'de')


def test_lines_are_those_of_python_with_lf_or_crlf_and_with_or_without_a_last_newline(tmp_path):
    # U+2028 and the form feed separate lines for str.splitlines, and belong to a sentence here.
    sentences = ['a', '', 'b\u2028c', 'd\x0ce', 'ü ✓']
    for newline in ('\n', '\r\n'):
        for ending in ('', newline):
            one = _write(tmp_path / 'x.en', newline.join(sentences) + ending)
            two = _write(tmp_path / 'x.de', newline.join(sentences[::-1]) + ending)
            source = sources.open_source(f'{one},{two}')
            assert [source[i]['source'] for i in range(len(source))] == sentences
            assert [source[i]['target'] for i in range(len(source))] == sentences[::-1]
            assert source[-1] == source[4] and source.languages == ('en', 'de')
            with pytest.raises(IndexError):
                source[5]


def test_tsv_equals_the_pair_of_files_with_its_columns(tmp_path):
    tsv = sources.open_source(_write(tmp_path / 'x.tsv', '\ufeffa b\tc\nd\te f\n\tg\n'))
    pair = sources.open_source(_write(tmp_path / 'x.s', 'a b\nd\n\n') + ',' + _write(tmp_path / 'x.t', 'c\ne f\ng\n'))
    assert list(sources.iterate(tsv)) == list(sources.iterate(pair))


def test_reverse_exchanges_the_sides_and_limit_keeps_the_first():
    forward = sources.open_source('soft.en-de', 'test')
    reverse = sources.open_source('soft.en-de', 'test', direction='reverse', limit=7)
    assert len(reverse) == 7 and reverse.languages == ('de', 'en')
    assert [(e['target'], e['source']) for e in sources.iterate(reverse)] == [
        (forward[i]['source'], forward[i]['target']) for i in range(7)
    ]


@pytest.mark.parametrize(
    'spec, words',
    [
        ('{}/missing.tsv', ['missing.tsv', 'not a file']),
        ('{}/empty.tsv', ['empty.tsv', 'is empty']),
        ('{}/no_tab.tsv', ['no_tab.tsv:2 has 0 tabs', '2 such rows']),
        ('{}/two_tabs.tsv', ['two_tabs.tsv:3 has 2 tabs']),
        ('{}/blank_line.tsv', ['blank_line.tsv:2 has 0 tabs']),
        ('{}/long.en,{}/short.de', ['long.en', '3 lines', 'short.de', 'has 2']),
        ('{}/long.en,{}/missing.de', ['missing.de', 'not a file']),
        ('{}', ['names no data set']),
        ('soft.en_de', ["did you mean 'soft.en-de'"]),
        ('tfds:wmt14_trnslate/de-en', ['wmt14_trnslate', "did you mean 'wmt14_translate'"]),
        ('tfds:wmt14_translate/xx-en', ['wmt14_translate/xx-en', 'xx-en not found']),
        ('tfds:mnist', ['mnist', 'no source and target text']),
    ],
)
def test_bad_spec_gives_one_line_which_says_where(tmp_path, spec, words):
    _write(tmp_path / 'empty.tsv', '')
    _write(tmp_path / 'no_tab.tsv', 'a\tb\nc d\ne\tf\ng\n')
    _write(tmp_path / 'two_tabs.tsv', 'a\tb\nc\td\ne\tf\tg\n')
    _write(tmp_path / 'blank_line.tsv', 'a\tb\n\nc\td\n')
    _write(tmp_path / 'long.en', 'a\nb\nc\n')
    _write(tmp_path / 'short.de', 'a\nb\n')
    with pytest.raises(errors.UserError) as caught:
        sources.open_source(spec.replace('{}', str(tmp_path)), 'train', tfds_directory=str(tmp_path / 'tfds'))
    message = str(caught.value)
    assert '\n' not in message
    for word in words:
        assert word in message


def test_a_line_which_is_not_utf8_is_named(tmp_path):
    source = sources.open_source(_write(tmp_path / 'latin.tsv', 'a\tb\nc\t\xfc\n'.encode('latin-1')))
    assert source[0] == {'source': 'a', 'target': 'b'}
    with pytest.raises(errors.UserError, match='latin.tsv:2 is not UTF-8'):
        source[1]


def test_unknown_split_and_direction_are_refused():
    with pytest.raises(errors.UserError, match="did you mean 'valid'"):
        sources.open_source('soft.en-de', 'validation')
    with pytest.raises(errors.UserError, match="did you mean 'reverse'"):
        sources.open_source('soft.en-de', 'test', direction='reversed')


BUILDER = '''
    import tensorflow_datasets as tfds

    class TinyTranslate(tfds.core.GeneratorBasedBuilder):
        """Twelve sentences."""

        VERSION = tfds.core.Version('1.0.0')

        def _info(self):
            languages = ('en', 'de')
            features = tfds.features.Translation(languages=languages)
            return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=('de', 'en'))

        def _split_generators(self, manager):
            return {'train': self._generate_examples(9), 'validation': self._generate_examples(3)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {'en': f'house {i}', 'de': f'Häuser {i}'}
'''


@pytest.fixture
def tfds_directory(tmp_path):
    """A directory with the data set tiny_translate, built without TensorFlow as its users build theirs."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    (tmp_path / 'tiny_translate').mkdir()
    file = tmp_path / 'tiny_translate' / 'tiny_translate.py'
    file.write_text(textwrap.dedent(BUILDER))
    spec = importlib.util.spec_from_file_location('tiny_translate', file)
    module = importlib.util.module_from_spec(spec)
    sys.modules['tiny_translate'] = module
    try:
        with tfds.core.registered.skip_registration():
            spec.loader.exec_module(module)
        builder = module.TinyTranslate(data_dir=str(tmp_path / 'data'), file_format='array_record')
        builder.download_and_prepare()
    finally:
        del sys.modules['tiny_translate']
    return str(tmp_path / 'data')


def test_tfds_set_is_read_without_tensorflow_in_its_stated_direction(tfds_directory):
    train = sources.open_source('tfds:tiny_translate', 'train', tfds_directory=tfds_directory)
    valid = sources.open_source('tfds:tiny_translate', 'valid', 'reverse', tfds_directory=tfds_directory)
    named = sources.open_source('tfds:tiny_translate:train[:4]', 'test', tfds_directory=tfds_directory)
    assert (train.languages, valid.languages) == (('de', 'en'), ('en', 'de'))
    expected = {(f'Häuser {i}', f'house {i}') for i in range(9)}
    assert {(e['source'], e['target']) for e in sources.iterate(train)} == expected and len(train) == 9
    assert {(e['target'], e['source']) for e in sources.iterate(valid)} == {
        (f'Häuser {i}', f'house {i}') for i in range(3)
    }
    assert list(sources.iterate(named)) == [train[i] for i in range(4)]
    assert 'tensorflow' not in sys.modules
    with pytest.raises(errors.UserError, match="has no split 'test'"):
        sources.open_source('tfds:tiny_translate', 'test', tfds_directory=tfds_directory)


def test_tfds_set_in_another_format_is_refused(tfds_directory):
    (info,) = pathlib.Path(tfds_directory).rglob('dataset_info.json')
    info.write_text(info.read_text().replace('array_record', 'tfrecord'))
    with pytest.raises(errors.UserError, match='array_record') as caught:
        sources.open_source('tfds:tiny_translate', 'train', tfds_directory=tfds_directory)
    assert '\n' not in str(caught.value)


def test_wmt_builders_are_found_although_tfds_does_not_register_them(tmp_path):
    builder = sources._tfds_builder('wmt14_translate/de-en', str(tmp_path))
    assert builder.info.supervised_keys == ('de', 'en')
