"""The end of a run: averaged checkpoints, scores, sample translations and pictures."""

from __future__ import annotations

import logging
from typing import Any

import jax

from transformer_jax.checkpoints import CheckpointManager
from transformer_jax.checkpoints.restore import average_params
from transformer_jax.data.sources import Source
from transformer_jax.models import count_params
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.pictures import draw
from transformer_jax.training.run_directory import RESULT_FILE
from transformer_jax.training.setup import Run, evaluation_params
from transformer_jax.training.state import TrainState

_logger = logging.getLogger(__name__)

SAMPLES_FILE = 'samples.txt'
TRANSLATIONS_FILE = 'translations_{split}.txt'
SAMPLES = 8


def finish(run: Run, evaluator: Evaluator, state: TrainState, seconds: float) -> dict[str, Any]:
    """Returns the result of a trained run, after writing it with plots/*.png and, of translations, samples.txt and
    translations_<split>.txt, one line for each example of the split in its order.

    Judged are the mean of the last `average_last` checkpoints, else the moving average, else the last parameters.
    """
    training = run.experiment.training
    params, judged = evaluation_params(state), 'moving average' if training.ema_decay else 'last step'
    if training.average_last > 1:
        params, judged = _average(run), f'mean of the last {training.average_last} checkpoints'
    result: dict[str, Any] = {
        'name': run.experiment.name,
        'step': training.steps,
        'seconds_trained': seconds,
        'parameters': count_params(state.params),
        'skipped_steps': int(state.skipped),
        'judged': judged,
        'devices': f'{jax.device_count()} {jax.devices()[0].device_kind}',
    }
    samples: list[dict[str, str]] = []
    for split, source in (('valid', run.valid_source), ('test', run.test_source)):
        if source is not None:
            result[split], samples, translations = _judge(evaluator, params, source)
            if run.is_first and translations:
                path = run.directory.path / TRANSLATIONS_FILE.format(split=split)
                path.write_text('\n'.join(translations) + '\n')
            _logger.info('%s: loss %.4f, %s', split, result[split]['loss'], result[split]['scores'])
    result['samples'] = samples
    draw(run, params, samples)
    if run.is_first:
        if evaluator.references:
            _write_samples(run, samples)
        run.directory.write_json(RESULT_FILE, result)
    return result


def _judge(evaluator: Evaluator, params: Any, source: Source) -> tuple[dict[str, Any], list[dict[str, str]], list[str]]:
    """Returns the numbers of a split, samples of it, and its translations."""
    if not evaluator.references:
        found = evaluator.loss(params, source)
        shown = ', '.join(f'{name} {value:.4g}' for name, value in found.items() if name != 'loss')
        return {**found, 'scores': shown}, [], []
    scores, hypotheses = evaluator.scores(params, source)
    chosen = range(0, len(source), max(len(source) // SAMPLES, 1))[:SAMPLES]
    samples = [{**source[index], 'translation': hypotheses[index]} for index in chosen]
    return {**evaluator.loss(params, source), 'scores': str(scores), **scores.to_dict()}, samples, hypotheses


def _average(run: Run) -> Any:
    """Returns the mean of the last checkpoints ("Attention Is All You Need", section 6.1) and keeps it in averaged/."""
    training = run.experiment.training
    mean = average_params(run.directory.checkpoints, training.average_last)
    params = jax.device_put(mean, run.shardings.params)
    with CheckpointManager(run.directory.averaged, keep=1) as manager:
        manager.save(training.steps, {'params': params}, {'checkpoints': training.average_last})
    return params


def _write_samples(run: Run, samples: list[dict[str, str]]) -> None:
    lines = [f'{name}: {sample[name]}' for sample in samples for name in ('source', 'translation', 'target')]
    blocks = ['\n'.join(lines[start : start + 3]) for start in range(0, len(lines), 3)]
    (run.directory.path / SAMPLES_FILE).write_text('\n\n'.join(blocks) + '\n')
