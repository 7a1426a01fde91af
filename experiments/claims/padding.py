"""Padding, buckets and packing: how many token slots hold no token."""

from __future__ import annotations

from experiments.claims.finding import Finding, bars, verdict
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.data.config import DataConfig
from transformer_jax.data.objectives import make_objective
from transformer_jax.data.pipeline import TrainPipeline
from transformer_jax.data.sources import open_split
from transformer_jax.data.tokenizers import open_tokenizer

WAYS = {
    'padded to 64': {'batching': 'bucket', 'bucket_boundaries': (1,)},
    'buckets 16, 32, 64': {'batching': 'bucket'},
    'packed': {'batching': 'pack'},
}


def measure(figure: str) -> Finding:
    """Plans an epoch of the embedded sentence pairs three times."""
    base = DataConfig(vocab_size=2000, batch_tokens=2048)
    source = open_split(base, 'train')
    tokenizer = open_tokenizer(base, source)
    shares, steps = {}, {}
    for name, changes in WAYS.items():
        data = base.replace(**changes)
        pipeline = TrainPipeline(source, tokenizer, make_objective(data, tokenizer), data, seed=0)
        shares[name], steps[name] = pipeline.padding_share, pipeline.steps_per_epoch
    draw_bars(
        'An epoch of 26,485 sentence pairs',
        {'padding [%]': bars({name: 100 * share for name, share in shares.items()})},
        figure,
    )
    padded, bucketed, packed = shares.values()
    return Finding(
        'Batches of similar lengths waste less than padding to the longest, and packing wastes least.',
        f'{padded:.0%} of the slots are padding when every pair is padded to 64 + 64 tokens, {bucketed:.0%} in '
        f'buckets, {packed:.0%} packed: {", ".join(f"{count:,}" for count in steps.values())} steps an epoch of '
        '2,048 slots.',
        verdict(padded > bucketed, bucketed > packed),
    )
