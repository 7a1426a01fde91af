"""Meshes, rules from logical axis names to mesh axes, and the table shown at start."""

from transformer_jax.sharding.batch import batch_sharding, check_batch, place_batch
from transformer_jax.sharding.mesh import MESH_AXES, MeshConfig, make_mesh
from transformer_jax.sharding.rules import DEFAULT_RULES, resolve
from transformer_jax.sharding.table import bytes_per_device, check_replicated, startup_table

__all__ = [
    'DEFAULT_RULES',
    'MESH_AXES',
    'MeshConfig',
    'batch_sharding',
    'bytes_per_device',
    'check_batch',
    'check_replicated',
    'make_mesh',
    'place_batch',
    'resolve',
    'startup_table',
]
