"""Checkpoints: saved in the background, checksummed, restored strictly onto whatever devices are here."""

from transformer_jax.checkpoints.manager import CheckpointManager, Restored

__all__ = ['CheckpointManager', 'Restored']
