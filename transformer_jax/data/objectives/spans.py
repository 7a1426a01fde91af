"""T5's span corruption (Raffel et al. 2020, sections 3.1.4 and 3.3.4)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from transformer_jax import errors
from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import planner, ragged, sources, tokenizers
from transformer_jax.data.objectives import base


@dataclasses.dataclass(frozen=True)
class SpanExamples(base.Examples):
    """Pieces as they stand in the text; `corrupted` (n, 2) are their lengths once spans are taken out of them."""

    corrupted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example in each stream, (n, streams)."""
        return self.corrupted


class SpanCorruption(base.Objective):
    """Missing spans from the text around them: 'Thank you <X> me <Y> week.' -> '<X> for inviting <Y> last <Z>'.

    Of n tokens, round(noise_density n) stand in round(noise / mean_span) spans, at least one of each where n >= 2; the
    lengths of the spans and of what lies between them are random compositions, and a piece begins with text. The source
    is the text with one sentinel for each span, the target each sentinel with its span and a final sentinel; both end
    with the end mark. How many tokens each side has depends on n alone, so the plan of an epoch stands before its
    spans are drawn from (seed, epoch, piece).

    Batches are those of `Translation`: teacher-forced, bucketed or packed.

    Raises:
      UserError: for a vocabulary without sentinels, or pieces which need more of them than there are.
    """

    name, kind = 'span_corruption', 'encoder_decoder'

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: data_config.DataConfig, model: ModelConfig | None = None
    ):
        super().__init__(tokenizer, config, model)
        self.decoder_start_id = base.decoder_start_id(tokenizer, config)
        self._sentinels = np.array([tokenizer.symbol(name) for name in data_config.SENTINELS])
        lengths = np.arange(1, sum(self.widths) + 1)
        fits = (self._lengths(lengths) <= self.widths).all(axis=1)
        self.piece_length = int(lengths[fits].max(initial=0))
        if self.piece_length < 2:
            raise errors.UserError(
                f'rows of {self.widths} tokens hold no piece of text with a span; raise both lengths'
            )
        spans = int(self._counts(np.array([self.piece_length]))[1][0])
        if spans >= len(self._sentinels):
            raise errors.UserError(
                f'a piece of {self.piece_length} tokens has {spans} spans, and there are {len(self._sentinels)} '
                'sentinels, one of them final; lower data.source_length or data.noise_density, or raise data.mean_span'
            )

    def _counts(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens in spans, spans) of pieces of these lengths."""
        noise = np.clip(np.round(lengths * self._config.noise_density), 1, np.maximum(lengths - 1, 0))
        noise = np.minimum(noise, np.maximum(lengths - 1, 0)).astype(np.int64)
        # Spans are parted by text, so there are no more of them than tokens of either kind.
        most = np.minimum(noise, lengths - noise)
        return noise, np.minimum(np.maximum(np.round(noise / self._config.mean_span), 1), most).astype(np.int64)

    def _lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the tokens of source and target, (n, 2), of pieces of these lengths."""
        noise, spans = self._counts(lengths)
        return np.stack([lengths - noise + spans + 1, noise + spans + 2], axis=1)

    def encode(self, source: sources.Source, training: bool) -> SpanExamples:
        del training  # Nothing is left out.
        pieces = base.cut(self._tokenizer, source, self.piece_length)
        stream = ragged.Ragged.join(pieces.tokens)
        return SpanExamples((stream,), pieces.ids, len(pieces.ids), corrupted=self._lengths(stream.lengths))

    def batch(self, examples: base.Examples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        (stream,) = examples.streams
        pairs = [self.corrupt(stream[example], random) for example, random in base.generators(plan, seed)]
        every = plan._replace(examples=np.arange(len(pairs)))
        streams = tuple(ragged.Ragged.join(side) for side in (zip(*pairs, strict=True) if pairs else ((), ())))
        return base.teacher_forced(streams, every, packed, self.decoder_start_id, self._tokenizer.pad_id)

    def corrupt(self, tokens: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns source and target of one piece, end marks included."""
        noise, spans = (int(count[0]) for count in self._counts(np.array([len(tokens)])))
        end = [self._tokenizer.eos_id]
        if not spans:
            return np.concatenate([tokens, end]), np.concatenate([self._sentinels[:1], end])
        text = _composition(len(tokens) - noise, spans, random)
        missing = _composition(noise, spans, random)
        starts = np.cumsum(np.stack([text, missing], axis=1).reshape(-1))[:-1]
        parts = np.split(tokens, starts)
        source, target = [], []
        for sentinel, kept, span in zip(self._sentinels[:spans], parts[::2], parts[1::2], strict=True):
            source += [kept, [sentinel]]
            target += [[sentinel], span]
        return np.concatenate([*source, end]), np.concatenate([*target, self._sentinels[spans : spans + 1], end])


def _composition(total: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """Returns `parts` lengths of at least 1 which add up to `total`, all such lists equally likely."""
    borders = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))
