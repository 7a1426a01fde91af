"""Decoding: searches which know only `tokens, cache -> logits, cache`, for every architecture with a cache."""

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.cache_api import gather_beams, init_cache, prefill, step
from transformer_jax.decoding.generate import Generation, generate
from transformer_jax.decoding.scoring import score
from transformer_jax.decoding.speculative import Draft
from transformer_jax.decoding.streaming import stream

__all__ = [
    'DecodeConfig',
    'Draft',
    'Generation',
    'gather_beams',
    'generate',
    'init_cache',
    'prefill',
    'score',
    'step',
    'stream',
]
