"""CTranslate2 as a contestant, with fp32 or int8 weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ctranslate2
import numpy as np

from benchmarks.decoding_jobs import SHAPES, Job


def make_generate(
    job: Job, precision: str, folder: Path, workers: int, threads: int
) -> tuple[Callable[[], np.ndarray], dict]:
    """Returns `run() -> best tokens (batch, new tokens)` and facts.

    Args:
      precision: 'float32' or 'int8'.
      workers: batches which run at the same time, each of an equal share of the rows; threads: of each.
    """
    shape = SHAPES[job.shape]
    options = dict(device='cpu', compute_type=precision, inter_threads=workers, intra_threads=threads)
    kind = ctranslate2.Translator if shape.source else ctranslate2.Generator
    model = kind(str(folder / 'ctranslate2'), **options)
    # A word is the name of its id; ids below 3 and the last one are not among the inputs.
    rows = [[f'w{token}' for token in row] for row in job.inputs().tolist()]
    search = dict(beam_size=job.beams, max_batch_size=-(-job.batch // workers))
    length = shape.new_tokens

    def run() -> np.ndarray:
        if shape.source:
            results = model.translate_batch(rows, max_decoding_length=length, min_decoding_length=length, **search)
            return np.array([[_number(word) for word in result.hypotheses[0]] for result in results])
        results = model.generate_batch(
            rows, max_length=length, min_length=length, include_prompt_in_result=False, **search
        )
        return np.array([result.sequences_ids[0] for result in results])

    return run, {'versions': {'ctranslate2': ctranslate2.__version__}}


def _number(word: str) -> int:
    return int(word[1:]) if word[1:].isdigit() else -1
