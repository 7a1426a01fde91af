"""The significance of differences in BLEU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import sacrebleu
from sacrebleu.significance import PairedTest


class _PooledBLEU(sacrebleu.BLEU):
    """BLEU whose n-gram counts of a sentence are summed over several translations of it, one by each seed.

    A sentence here is the tuple of its translations. So a resample of sentences takes or leaves all translations of
    one together; drawn one by one, those of other seeds would pass for independent evidence.
    """

    def _extract_corpus_statistics(self, hypotheses, references):
        by_seed = [
            super(_PooledBLEU, self)._extract_corpus_statistics(list(one), references)
            for one in zip(*hypotheses, strict=True)
        ]
        return np.sum(np.asarray(by_seed), axis=0).tolist()


def bootstrap_p_value(
    baseline: Sequence[Sequence[str]], other: Sequence[Sequence[str]], references: Sequence[str], samples: int = 1000
) -> float:
    """Returns the p-value of sacreBLEU's paired bootstrap test on the difference in BLEU (Koehn 2004).

    Args:
      baseline, other: for each seed, the translations of all sentences in the order of `references`.
      samples: resamples of the sentences; the smallest p-value is 1 / (samples + 1).
    """
    if list(map(list, baseline)) == list(map(list, other)):
        return 1.0  # sacreBLEU counts differences above 0, and finds none
    systems = [('baseline', list(zip(*baseline, strict=True))), ('other', list(zip(*other, strict=True)))]
    test = PairedTest(systems, {'BLEU': _PooledBLEU()}, [list(references)], test_type='bs', n_samples=samples)
    _, scores = test()
    return float(scores['BLEU'][1].p_value)
