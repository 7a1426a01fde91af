"""Meshes, rules from logical axis names to mesh axes, and the table shown at start."""

from transformer_jax.sharding.activations import constrain, mesh_of, tracing_on
from transformer_jax.sharding.batch import (
    batch_sharding,
    batch_shardings,
    check_batch,
    place_batch,
    row_devices,
    row_share,
)
from transformer_jax.sharding.mesh import MeshConfig, device_bytes, make_mesh
from transformer_jax.sharding.rules import DEFAULT_RULES, MESH_AXES, Rules, parse_rules, resolve
from transformer_jax.sharding.table import bytes_per_device, check_memory, check_replicated, startup_table

__all__ = [
    'DEFAULT_RULES',
    'MESH_AXES',
    'MeshConfig',
    'Rules',
    'batch_sharding',
    'batch_shardings',
    'bytes_per_device',
    'check_batch',
    'check_memory',
    'check_replicated',
    'constrain',
    'device_bytes',
    'make_mesh',
    'mesh_of',
    'parse_rules',
    'place_batch',
    'resolve',
    'row_devices',
    'row_share',
    'startup_table',
    'tracing_on',
]
