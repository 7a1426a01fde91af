"""Dropout and label smoothing (Vaswani et al. 2017, section 5.4; table 3, rows D)."""

from __future__ import annotations

from experiments.claims.finding import Finding, seed_bars, verdict
from experiments.claims.trained import mean, results
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.sweeps import axis, chain

PAIRS, STEPS = 2000, 600
DROPOUT, SMOOTHING = (0.0, 0.1, 0.3), (0.1, 0.2)


def measure(figure: str) -> Finding:
    """Trains on few pairs, which it sees many times, so that there is something to regularise."""
    points = chain(axis('model.dropout', DROPOUT), axis('training.label_smoothing', SMOOTHING))
    found = results(
        points,
        changes={
            'data.limit': PAIRS,
            'training.label_smoothing': 0.0,
            'training.steps': STEPS,
            'training.evaluate_every': STEPS,
            'training.checkpoint_every': STEPS,
        },
    )
    title = f'{PAIRS:,} sentence pairs, {STEPS} steps (dropout without smoothing; smoothing without dropout)'
    panels = {
        'validation loss [nats a token]': seed_bars(found),
        'next word right [%]': seed_bars(found, 'accuracy', 100.0),
    }
    draw_bars(title, panels, figure)
    (none, *dropped), smoothed = list(found.values())[: len(DROPOUT)], list(found.values())[len(DROPOUT) :]
    best, helped = min(map(mean, dropped)), max(mean(runs, 'accuracy') for runs in smoothed)
    return Finding(
        'Dropout helps against overfitting; label smoothing makes perplexity worse, but the choice of words better.',
        f'Trained on {PAIRS:,} pairs the loss is {mean(none):.2f} nats a token without either and {best:.2f} with the '
        f'better dropout. Smoothing by {SMOOTHING[0]} changes it to {mean(smoothed[0]):.2f}; the next word is right in '
        f'{100 * mean(none, "accuracy"):.1f}% without and {100 * helped:.1f}% with the better smoothing.',
        verdict(best < mean(none), mean(smoothed[0]) > mean(none), helped > mean(none, 'accuracy')),
    )
