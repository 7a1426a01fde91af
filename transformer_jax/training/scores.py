"""Scores of translations: sacreBLEU and chrF with their signatures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sacrebleu

from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Scores:
    """Corpus scores of 0 to 100 and the signatures which say how they were computed."""

    bleu: float
    bleu_lowercase: float
    chrf: float
    bleu_signature: str
    bleu_lowercase_signature: str
    chrf_signature: str

    def to_dict(self) -> dict[str, float | str]:
        """Returns the fields as JSON has them."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f'BLEU {self.bleu:.2f} ({self.bleu_signature}), lower-cased {self.bleu_lowercase:.2f}, '
            f'chrF {self.chrf:.2f} ({self.chrf_signature})'
        )


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """Returns corpus scores of detokenised hypotheses against untouched references (Post 2018).

    Both are plain text: sacreBLEU's own tokeniser (13a) is the only one, and what a hypothesis lacks in
    detokenisation costs points.

    Raises:
      UserError: when the counts differ or there is nothing to score.
    """
    if len(hypotheses) != len(references):
        raise UserError(f'{len(hypotheses)} translations but {len(references)} references; each needs exactly one')
    if not references:
        raise UserError('there are no sentences to score')
    cased, lower, chrf = sacrebleu.BLEU(), sacrebleu.BLEU(lowercase=True), sacrebleu.CHRF()
    values = [metric.corpus_score(list(hypotheses), [list(references)]).score for metric in (cased, lower, chrf)]
    return Scores(*values, *(str(metric.get_signature()) for metric in (cased, lower, chrf)))
