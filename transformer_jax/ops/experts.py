"""Dropless experts on many devices: the one kernel in which collectives are written by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.ops.dropout import dropout
from transformer_jax.ops.routing import group_by_expert, grouped_product
from transformer_jax.sharding.activations import axes_of, current_mesh

EXPERT_AXIS, TENSOR_AXIS = 'expert', 'tensor'


class Kernels(NamedTuple):
    """The matrices of E experts: up and gate EDF (gate None without one), down EFD."""

    up: jax.Array
    gate: jax.Array | None
    down: jax.Array


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a device's tokens stand among all of them.

    Attributes:
      rows, positions: mesh axes which split B and T; expert, tensor: those which split E and F, None if none does.
      shards: devices along the expert axis.
      exchange: 'ragged' sends each token to its experts' devices; 'gather' shows every device the tokens of all.
    """

    rows: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    expert: str | None = None
    tensor: str | None = None
    shards: int = 1
    exchange: str = 'gather'


def dropless(
    x_BTD: jax.Array,
    experts_BTk: jax.Array,
    weights_BTk: jax.Array,
    kernels: Kernels,
    activation: Callable[[jax.Array], jax.Array],
    rate: float,
    key: jax.Array | None,
) -> jax.Array:
    """Returns y_BTD = sum_i g_i FFN_{e_i}(x) over a token's k choices, in fp32; choices of expert E add nothing.

    Tokens are sorted by expert and multiplied in groups of any size (Gale et al. 2022), on each device those of its
    own experts. Under `tracing_on` a mesh it is one `shard_map`: B lies over the rows' axes, E over 'expert', F over
    'tensor', and tokens travel between the devices of an expert axis by `ragged_all_to_all`, which CPUs lack: there
    they are gathered and the results scattered back (all_gather, psum_scatter), with the same numbers.

    Dropout of the hidden layer hashes the number of the choice in the global batch, so its mask is the same on any
    mesh.

    Args:
      weights_BTk: g, fp32.
      rate, key: of dropout on the activated hidden layer; key None: no dropout.

    Raises:
      UserError: if experts lie on several devices and the rows do not divide over the mesh.
    """
    mesh = current_mesh()
    if mesh is None:
        body = functools.partial(_local, place=Place(), activation=activation, rate=rate)
        return body(x_BTD, experts_BTk, weights_BTk, kernels, key)
    place = Place(
        rows=axes_of('batch', x_BTD.shape[0], mesh),
        positions=axes_of('length', x_BTD.shape[1], mesh),
        expert=EXPERT_AXIS if mesh.shape[EXPERT_AXIS] > 1 else None,
        tensor=TENSOR_AXIS if mesh.shape[TENSOR_AXIS] > 1 else None,
        shards=mesh.shape[EXPERT_AXIS],
        exchange='gather' if mesh.abstract_device.platform == 'cpu' else 'ragged',
    )
    if place.expert is not None and place.expert not in place.rows:
        raise UserError(
            f'{x_BTD.shape[0]} rows do not divide over the row devices, as tokens of an expert axis have to'
        )
    tokens = PartitionSpec(place.rows or None, place.positions or None)
    matrices = Kernels(
        PartitionSpec(place.expert, None, place.tensor),
        None if kernels.gate is None else PartitionSpec(place.expert, None, place.tensor),
        PartitionSpec(place.expert, place.tensor, None),
    )
    kernel = jax.shard_map(
        functools.partial(_local, place=place, activation=activation, rate=rate),
        in_specs=(tokens, tokens, tokens, matrices, PartitionSpec()),
        out_specs=tokens,
    )
    return kernel(x_BTD, experts_BTk, weights_BTk, kernels, key)


def _local(x_BTD, experts_BTk, weights_BTk, kernels, key, *, place, activation, rate):
    """One device's part: its tokens, its experts, its columns of F."""
    (B, T, D), k, held = x_BTD.shape, experts_BTk.shape[-1], kernels.up.shape[0]
    x_nD = x_BTD.reshape(B * T, D)
    experts_nk, weights_nk = experts_BTk.reshape(B * T, k), weights_BTk.reshape(B * T, k)
    choices_nk = _tokens(B, T, place)[:, None] * k + jnp.arange(k)

    def feed_forward(x_mD, choices_m, sizes_E):
        hidden = grouped_product(x_mD, kernels.up, sizes_E)
        if kernels.gate is None:
            hidden = activation(hidden)
        else:
            hidden = activation(grouped_product(x_mD, kernels.gate, sizes_E)) * hidden
        if key is not None:
            hidden = dropout(hidden, rate, key, _numbers(choices_m, hidden.shape[1], place))
        return grouped_product(hidden, kernels.down, sizes_E, jnp.float32)

    if place.expert is None:
        y_nD = _combine(feed_forward, x_nD, experts_nk, weights_nk, choices_nk, held)
    elif place.exchange == 'ragged':
        y_nD = _exchange(feed_forward, x_nD, experts_nk, weights_nk, choices_nk, held, place)
    else:
        gather = functools.partial(jax.lax.all_gather, axis_name=place.expert, tiled=True)
        mine = gather(experts_nk) - jax.lax.axis_index(place.expert) * held
        mine = jnp.where((mine >= 0) & (mine < held), mine, held)
        y = _combine(feed_forward, gather(x_nD), mine, gather(weights_nk), gather(choices_nk), held)
        y_nD = jax.lax.psum_scatter(y, place.expert, tiled=True)
    if place.tensor is not None:
        y_nD = jax.lax.psum(y_nD, place.tensor)
    return y_nD.reshape(B, T, D)


def _tokens(B: int, T: int, place: Place) -> jax.Array:
    """Returns the number of each of this device's tokens in the global batch, row by row."""
    row = jnp.arange(B) + (jax.lax.axis_index(place.rows) * B if place.rows else 0)
    position = jnp.arange(T) + (jax.lax.axis_index(place.positions) * T if place.positions else 0)
    length = T * (jax.lax.axis_size(place.positions) if place.positions else 1)
    return (row[:, None] * length + position).reshape(B * T)


def _numbers(choices_m: jax.Array, width: int, place: Place) -> jax.Array:
    """Returns the number of each element of a device's hidden rows among those of all choices and columns."""
    column = jnp.arange(width, dtype=jnp.uint32)
    whole = width
    if place.tensor is not None:
        column += (jax.lax.axis_index(place.tensor) * width).astype(jnp.uint32)
        whole *= jax.lax.axis_size(place.tensor)
    return choices_m.astype(jnp.uint32)[:, None] * jnp.uint32(whole) + column


def _combine(feed_forward, x_nD, experts_nk, weights_nk, choices_nk, held):
    """Returns the weighed sums of the experts held here, tokens in their order."""
    n, k = experts_nk.shape
    groups = group_by_expert(experts_nk, held)
    tokens_m = groups.order_m // k
    out_mD = feed_forward(x_nD[tokens_m], choices_nk.ravel()[groups.order_m], groups.sizes_E)
    weights_m = jnp.where(groups.expert_m < held, weights_nk.ravel()[groups.order_m], 0.0)
    return jnp.zeros((n, x_nD.shape[1]), jnp.float32).at[tokens_m].add(out_mD * weights_m[:, None])


def _exchange(feed_forward, x_nD, experts_nk, weights_nk, choices_nk, held, place):
    """As `_combine`, where each choice travels to the device of its expert and its result back.

    The buffer has room for every token of all devices, since one expert may be chosen by all.
    """
    n, k = experts_nk.shape
    P, m = place.shards, n * k
    me = jax.lax.axis_index(place.expert)
    groups = group_by_expert(experts_nk, P * held)
    tokens_m = groups.order_m // k
    sizes_PPE = jax.lax.all_gather(groups.sizes_E.reshape(P, held), place.expert)  # sender, receiver, expert
    sent_PP = sizes_PPE.sum(axis=2)
    start_PP = jnp.cumsum(sent_PP, axis=1) - sent_PP  # where a sender's rows for a receiver begin, at the sender
    place_PP = jnp.cumsum(sent_PP, axis=0) - sent_PP  # and at the receiver

    def send(rows_mA, size, backwards=False):
        empty = jnp.zeros_like(rows_mA, shape=(size, rows_mA.shape[1]))
        if backwards:
            offsets = place_PP[:, me], sent_PP[:, me], start_PP[:, me], sent_PP[me]
        else:
            offsets = start_PP[me], sent_PP[me], place_PP[me], sent_PP[:, me]
        return jax.lax.ragged_all_to_all(rows_mA, empty, *offsets, axis_name=place.expert)

    x_rD = send(x_nD[tokens_m], P * m)
    choices_r = send(choices_nk.ravel()[groups.order_m][:, None], P * m)[:, 0]
    # A sender's rows come sorted by expert, so the counts say whose each row is; those past the end are nobody's.
    counts_PE = sizes_PPE[:, me]
    ends = jnp.cumsum(counts_PE.ravel())
    group_r = jnp.searchsorted(ends, jnp.arange(P * m), side='right')
    expert_r = jnp.where(group_r < P * held, group_r % held, held)
    order_r = jnp.argsort(expert_r, stable=True)
    out_rD = feed_forward(x_rD[order_r], choices_r[order_r], counts_PE.sum(axis=0)).astype(x_nD.dtype)
    unsorted_rD = jnp.zeros_like(out_rD).at[order_r].set(out_rD)
    out_mD = send(unsorted_rD, m, backwards=True).astype(jnp.float32)
    weights_m = jnp.where(groups.expert_m < P * held, weights_nk.ravel()[groups.order_m], 0.0)
    return jnp.zeros((n, x_nD.shape[1]), jnp.float32).at[tokens_m].add(out_mD * weights_m[:, None])
