"""Checkpoints: saved in the background, checksummed, restored strictly onto whatever devices are here."""

from transformer_jax.checkpoints.listing import StepSummary, list_steps
from transformer_jax.checkpoints.manager import CheckpointManager, Restored
from transformer_jax.checkpoints.names import ArrayInfo
from transformer_jax.checkpoints.restore import (
    Partial,
    average_params,
    list_arrays,
    read_metadata,
    restore_params,
    restore_partial,
)

__all__ = [
    'ArrayInfo',
    'CheckpointManager',
    'Partial',
    'Restored',
    'StepSummary',
    'average_params',
    'list_arrays',
    'list_steps',
    'read_metadata',
    'restore_params',
    'restore_partial',
]
