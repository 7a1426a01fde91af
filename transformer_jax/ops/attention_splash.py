"""Attention on TPUs: the splash-attention kernels which come with JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from transformer_jax.ops.attention_inputs import Inputs
from transformer_jax.sharding.activations import axes_of, current_mesh

LANES = 128
# Larger blocks read keys and values less often; 512 x 512 scores in fp32 and their operands fit the vector memory.
_BLOCKS = (512, 256, LANES)
# A logit which every row also sees: it weighs exp(-1e30) = 0 beside a real one, and where a row sees no key, whose
# scores are the kernel's -0.7 of the largest float, it takes all the weight and adds nothing.
_SINK = -1e30


def unsupported(inputs: Inputs, platform: str) -> str | None:
    """Returns the first feature of a call which these kernels lack, None if they have them all."""
    (T, S), mask = inputs.lengths, inputs.mask
    if inputs.bias_BNTS is not None:
        return 'a bias on the scores'
    if inputs.drop is not None:
        return 'dropout of attention weights'
    if mask.prefix_B is not None:
        return 'a prefix which all tokens see'
    if mask.offset is not None:
        return 'a cache (queries which stand at a slot known only when it runs)'
    if mask.window is not None and mask.query_positions_BT is not None:
        return 'a window of stated positions; it measures distances in slots'
    if mask.causal and T > S:
        return f'causal attention of more queries ({T}) than keys ({S})'
    mesh = current_mesh()
    shards = _shards(mesh, 'length', T)
    if T % (LANES * shards) or S % LANES:
        return f'{T // shards} queries a device and {S} keys; both must be multiples of {LANES}'
    if mesh is not None and _axes(mesh, 'heads', inputs.query_BTNH.shape[2]) != _axes(
        mesh, 'kv_heads', inputs.key_BSKH.shape[2]
    ):
        return f'{inputs.key_BSKH.shape[2]} key heads on a mesh which splits query heads otherwise'
    return None


def attend(inputs: Inputs, platform: str) -> jax.Array:
    """Returns out BTNV, computed block by block with an online softmax (Dao et al. 2022, algorithm 1).

    The query is scaled, in fp32, before its product with the keys. On a mesh every device takes its own rows, heads
    and queries (`shard_map`); it has all keys of them, so nothing is communicated. Elsewhere than on a TPU the kernels
    are interpreted, which is slow and for tests.
    """
    query, key, value = inputs.query_BTNH, inputs.key_BSKH, inputs.value_BSKH
    query = (query.astype(jnp.float32) * inputs.scale).astype(query.dtype)
    mesh = current_mesh()
    B, T, N, _ = query.shape
    rows, heads, length = (_axes(mesh, name, size) for name, size in (('batch', B), ('heads', N), ('length', T)))
    kernel = _kernel(inputs, _shards(mesh, 'heads', N), _shards(mesh, 'length', T), interpret=platform != 'tpu')
    query_segments_BT, key_segments_BS = _segments(inputs)

    def local(kernel, query, key, value, query_segments, key_segments):
        sinks = jnp.full(query.shape[2], _SINK)

        def row(query, key, value, query_segments, key_segments):
            return kernel(query, key, value, kernels.SegmentIds(query_segments, key_segments), sinks)

        heads_first = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        return jnp.swapaxes(jax.vmap(row)(*heads_first, query_segments, key_segments), 1, 2)

    operands = query, key, value, query_segments_BT, key_segments_BS
    if mesh is None:
        return local(kernel, *operands)
    queries, keys = PartitionSpec(rows, length, heads), PartitionSpec(rows, None, heads)
    specs = queries, keys, keys, PartitionSpec(rows, length), PartitionSpec(rows)
    own = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(heads, None if _is_full(inputs) else length)))
    return jax.shard_map(local, in_specs=(own, *specs), out_specs=queries, check_vma=False)(kernel, *operands)


def _axes(mesh: AbstractMesh | None, name: str, size: int) -> tuple[str, ...] | None:
    return None if mesh is None else axes_of(name, size, mesh) or None


def _shards(mesh: AbstractMesh | None, name: str, size: int) -> int:
    shards = 1
    for axis in _axes(mesh, name, size) or ():
        shards *= mesh.shape[axis]
    return shards


def _is_full(inputs: Inputs) -> bool:
    return inputs.mask.window is None and not inputs.mask.causal


def _kernel(inputs: Inputs, head_shards: int, length_shards: int, interpret: bool) -> kernels.SplashAttentionKernel:
    (T, S), mask = inputs.lengths, inputs.mask
    queries = next(block for block in _BLOCKS if T // length_shards % block == 0)
    keys = next(block for block in _BLOCKS if S % block == 0)
    if _is_full(inputs):
        # JAX cannot cut a full mask into parts of its queries; that of one part serves all.
        visible, length_shards = masks.FullMask((T // length_shards, S)), 1
    elif mask.window is not None:
        ahead = 0 if mask.causal else mask.window - 1
        visible = masks.LocalMask((T, S), (mask.window - 1, ahead), offset=S - T)
    else:
        visible = masks.CausalMask((T, S), offset=S - T)
    sizes = kernels.BlockSizes(
        block_q=queries, block_kv=keys, block_q_dkv=queries, block_kv_dkv=keys, block_q_dq=queries, block_kv_dq=keys
    )
    return kernels.make_splash_mha(
        masks.MultiHeadMask([visible] * inputs.query_BTNH.shape[2]),
        block_sizes=sizes,
        head_shards=head_shards,
        q_seq_shards=length_shards,
        attn_logits_soft_cap=inputs.softcap,
        interpret=interpret,
    )


def _segments(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns segments of queries and keys which are equal just where a query may see a key; -1 is seen by none."""
    mask, (T, S), B = inputs.mask, inputs.lengths, inputs.query_BTNH.shape[0]
    if mask.query_segments_BT is None:
        queries, keys = jnp.ones((B, T), jnp.int32), jnp.ones((B, S), jnp.int32)
    else:
        queries = jnp.broadcast_to(mask.query_segments_BT, (B, T)).astype(jnp.int32)
        keys = jnp.broadcast_to(mask.key_segments_BS, (B, S)).astype(jnp.int32)
        keys = jnp.where(keys == 0, -1, keys)
    if mask.key_valid_BS is not None:
        keys = jnp.where(mask.key_valid_BS, keys, -1)
    return queries, keys
