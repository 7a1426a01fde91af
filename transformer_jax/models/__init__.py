"""Models: stacks made of layers."""

from transformer_jax.models.output import ModelOutput
from transformer_jax.models.parameters import (
    abstract_params,
    count_params,
    init_params,
    resize_vocabulary,
    scan_params,
    unroll_params,
)
from transformer_jax.models.transformer import build

__all__ = [
    'ModelOutput',
    'abstract_params',
    'build',
    'count_params',
    'init_params',
    'resize_vocabulary',
    'scan_params',
    'unroll_params',
]
