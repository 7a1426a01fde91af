"""One frozen DecodeConfig: every choice of a search, by name."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError, choose, suggest

LENGTH_PENALTIES = ('gnmt', 'length')
EARLY_STOPPINGS = ('first', 'heuristic', 'bound')


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How an answer is searched: greedy by default, beams where `beam_size` > 1, drawn where `sample`.

    A length n counts generated tokens, the end token included, prompt and `prefix_tokens` not. A hypothesis of n tokens
    whose processed log-probabilities sum to s scores s / penalty(n) under beams and s under greedy search and sampling:

      gnmt    penalty(n) = ((5 + n) / 6) ** alpha      (Wu et al. 2016, equation 14; the 2017 paper, section 6.1)
      length  penalty(n) = n ** alpha                  (transformers' length_penalty)

    Each step's scores pass, in this order (the order of transformers): the diversity penalty of beam groups,
    repetition penalty, blocked n-grams, forbidden tokens, `min_new_tokens`, the forced first token, the forced last
    token; and when sampling: temperature, top k, top p, min p. Beams process log-probabilities and do not renormalise;
    greedy search and sampling process logits and take the log-softmax of what is left (both as transformers does).

    Attributes:
      max_new_tokens: most tokens generated, in tokens; None with `max_new_tokens_over_source` None means 128, or what
        the model's positions leave.
      max_new_tokens_over_source: limit of a row = real tokens of `tokens` + this; the smaller of both limits wins.
      min_new_tokens: the end tokens are banned before this many tokens are generated.
      beam_size: hypotheses kept per sentence; 1 is greedy search (or one draw, with `sample`).
      num_return: answers per sentence, best first; at most `beam_size` for beams, draws for `sample`.
      length_penalty: 'gnmt' or 'length', above.
      length_penalty_alpha: its exponent; 0 is no penalty, negative favours short answers.
      early_stopping: when a sentence with `beam_size` finished hypotheses stops: 'first' at once; 'heuristic' when the
        best live sum over the penalty of the current length does not exceed the worst finished score; 'bound' when the
        best live sum over the most flattering length still reachable does not (nothing can improve then).
      temperature: logits are divided by it when sampling; 0 is argmax; one number, or one for each row.
      top_k: sample from the k largest logits (ties with the k-th kept); 0 is off; above the vocabulary keeps all.
      top_p: sample from the smallest set, most likely first, whose mass reaches p; 1 is off (Holtzman et al. 2020).
      min_p: sample from tokens at least this fraction as likely as the most likely; 0 is off.
      sample: draw from the distribution instead of taking its mode.
      repetition_penalty: scores of tokens already in prompt or answer are divided by it where positive and multiplied
        where negative (Keskar et al. 2019, section 4.1); padding does not count; 1 is off.
      no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and answer; 0 is off.
      forbidden_tokens: ids, or sequences of ids, which are never generated.
      forced_first_token: the first generated token, or None.
      forced_last_token: the token generated when a row stands at its limit, or None; it adds 0 to the score.
      eos_ids: ids which end an answer; empty means that only the limit does.
      pad_id: fills rows after their end.
      decoder_start_id: the id from which the decoder of an encoder-decoder starts.
      prefix_tokens: ids which every answer is forced to continue: placed after the decoder start id, or after the
        prompt of a decoder; part of the prompt, so neither returned nor counted.
      beam_groups: groups searched one after another in each step (Vijayakumar et al. 2016); divides `beam_size`.
      diversity_penalty: subtracted from a token's log-probability for each beam of an earlier group which chose it in
        this step.
      return_log_probs: also return the model's own log-probabilities, before any processing.

    Raises:
      UserError: on a value out of range, an unknown choice, or choices which contradict each other.
    """

    max_new_tokens: int | None = None
    max_new_tokens_over_source: int | None = None
    min_new_tokens: int = 0
    beam_size: int = 1
    num_return: int = 1
    length_penalty: str = 'gnmt'
    length_penalty_alpha: float = 0.6
    early_stopping: str = 'bound'
    temperature: float | tuple[float, ...] = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    sample: bool = False
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    forbidden_tokens: tuple[int | tuple[int, ...], ...] = ()
    forced_first_token: int | None = None
    forced_last_token: int | None = None
    eos_ids: tuple[int, ...] = (1,)
    pad_id: int = 0
    decoder_start_id: int = 0
    prefix_tokens: tuple[int, ...] = ()
    beam_groups: int = 1
    diversity_penalty: float = 0.0
    return_log_probs: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _hashable(getattr(self, field.name)))
        if isinstance(self.eos_ids, int):
            object.__setattr__(self, 'eos_ids', (self.eos_ids,))
        choose('length_penalty', self.length_penalty, LENGTH_PENALTIES)
        choose('early_stopping', self.early_stopping, EARLY_STOPPINGS)
        self._check_ranges()
        self._check_ids()
        self._check_combinations()

    def _check_ranges(self):
        for name, least in (('max_new_tokens', 1), ('max_new_tokens_over_source', 0)):
            _require(
                getattr(self, name) is None or getattr(self, name) >= least, self, name, f'at least {least}, or None'
            )
        for name, least in (
            ('min_new_tokens', 0),
            ('beam_size', 1),
            ('num_return', 1),
            ('top_k', 0),
            ('no_repeat_ngram_size', 0),
            ('beam_groups', 1),
            ('diversity_penalty', 0),
        ):
            _require(getattr(self, name) >= least, self, name, f'at least {least}')
        _require(0 < self.top_p <= 1, self, 'top_p', 'above 0 and at most 1 (1 is off)')
        _require(0 <= self.min_p <= 1, self, 'min_p', 'between 0 and 1 (0 is off)')
        _require(self.repetition_penalty > 0, self, 'repetition_penalty', 'above 0 (1 is off)')
        _require(
            bool(self.temperatures) and min(self.temperatures) >= 0, self, 'temperature', 'at least 0 (0 is argmax)'
        )

    def _check_ids(self):
        for where, token in self.token_ids():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise UserError(f'{where} holds {token!r}; a token id is a whole number, 0 or more')
        if () in self.forbidden_tokens:
            raise UserError('forbidden_tokens holds an empty sequence; give token ids or sequences of them')

    def _check_combinations(self):
        if self.beam_size % self.beam_groups:
            raise UserError(f'beam_groups = {self.beam_groups} does not divide beam_size = {self.beam_size}')
        if self.diversity_penalty and self.beam_groups == 1:
            raise UserError(f'diversity_penalty = {self.diversity_penalty} needs beam_groups of 2 or more')
        if self.sample and self.beam_size > 1:
            raise UserError(
                f'sample draws single answers; set beam_size = 1 instead of {self.beam_size} '
                '(num_return gives several draws)'
            )
        if not self.sample and self.num_return > self.beam_size:
            raise UserError(
                f'num_return = {self.num_return} is more than beam_size = {self.beam_size}; '
                'a search returns at most its beams'
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f'min_new_tokens = {self.min_new_tokens} is more than max_new_tokens = {self.max_new_tokens}'
            )
        if not self.sample:
            for name, off in (('top_k', (0,)), ('top_p', (1,)), ('min_p', (0,)), ('temperature', (0, 1))):
                if getattr(self, name) not in off:
                    raise UserError(
                        f'{name} = {getattr(self, name)} acts on draws only; set sample = True, or leave it out'
                    )

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperature as a tuple: of one number for all rows, or of one for each row."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    def token_ids(self) -> list[tuple[str, int]]:
        """Every token id of this config with the name of its field, so that it can be held against a vocabulary."""
        ids = [('pad_id', self.pad_id), ('decoder_start_id', self.decoder_start_id)]
        for name in ('forced_first_token', 'forced_last_token'):
            ids += [(name, getattr(self, name))] if getattr(self, name) is not None else []
        for name in ('eos_ids', 'prefix_tokens', 'forbidden_tokens'):
            for entry in getattr(self, name):
                ids += [(name, token) for token in (entry if isinstance(entry, tuple) else (entry,))]
        return ids

    def replace(self, **changes: Any) -> DecodeConfig:
        """Returns a copy with `changes`, checked anew.

        Raises:
          UserError: on an unknown name, with the nearest valid one.
        """
        _check_names(changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary of JSON types."""
        return {field.name: _lists(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecodeConfig:
        """Builds a config from `to_dict`'s form.

        Raises:
          UserError: on an unknown name, with the nearest valid one.
        """
        _check_names(values)
        return cls(**values)


def _require(held: bool, config: DecodeConfig, name: str, rule: str) -> None:
    if not held:
        raise UserError(f'{name} = {getattr(config, name)} is out of range; it is {rule}')


def _check_names(values: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(DecodeConfig)]
    for name in values:
        if name not in names:
            raise UserError(f"decode config has no field '{name}'{suggest(name, names)}")


def _hashable(value: Any) -> Any:
    """Lists become tuples, whole numbers of any library Python's."""
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(entry) for entry in value)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _lists(value: Any) -> Any:
    return [_lists(entry) for entry in value] if isinstance(value, tuple) else value
