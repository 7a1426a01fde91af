"""What a program computes and sends, read from its text: against formulas, and one program against another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.analysis import hlo
from transformer_jax.sharding import MeshConfig, make_mesh
from transformer_jax.training.flops import matrix_product_flops

B, T, D, F, L = 16, 4, 16, 32, 5
DEVICES = 8


def stack(weights, x, unroll=1):
    def layer(x, weights):
        up, down = weights
        return jnp.tanh(x @ up) @ down, None

    return (jax.lax.scan(layer, x, weights, unroll=unroll)[0] ** 2).sum()


def shapes(up=None, x=None, mesh=None):
    def array(shape, spec):
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    return (array((L, D, F), up), array((L, F, D), up)), array((B, T, D), x)


def compiled(function, *arguments, **options):
    return jax.jit(function, **options).lower(*arguments).compile()


def test_a_scanned_stack_has_the_flops_of_the_unrolled_one_and_of_the_formula():
    """Forward two products a layer, backward four; XLA's own count has the scan's body once."""
    scanned = compiled(jax.grad(stack, (0, 1)), *shapes())
    unrolled = compiled(jax.grad(lambda *arguments: stack(*arguments, unroll=L), (0, 1)), *shapes())
    formula = 3 * 2 * (2 * B * T * D * F) * L
    for program in (scanned, unrolled):
        costs = hlo.costs(program.as_text())
        assert costs.flops == formula and not costs.unbounded and not costs.collectives
    assert 'while(' in scanned.as_text() and 'while(' not in unrolled.as_text()
    assert scanned.cost_analysis()['flops'] < formula / 2
    assert matrix_product_flops(jax.grad(stack, (0, 1)), *shapes()) == formula


def test_collectives_of_a_known_sharding_are_those_of_the_formula():
    """FSDP by hand: each layer's two matrices are gathered forward, and their gradients reduced backward."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=DEVICES))
    rows, whole = NamedSharding(mesh, PartitionSpec('fsdp')), NamedSharding(mesh, PartitionSpec())

    def gathered(weights, x):
        def layer(x, weights):
            up, down = (jax.lax.with_sharding_constraint(w, whole) for w in weights)
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ up) @ down, rows), None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()

    arguments = shapes(PartitionSpec(None, 'fsdp'), PartitionSpec('fsdp'), mesh)
    out = jax.tree.map(lambda x: x.sharding, arguments[0])
    costs = hlo.costs(compiled(jax.grad(gathered), *arguments, out_shardings=out).as_text())
    matrices, share = L * 2 * D * F * 4, (DEVICES - 1) / DEVICES
    sent = costs.bytes_by_kind()
    assert sent['all-gather'] == matrices * share
    # This compiler reduces a gradient to all and then takes a part, which sends twice what a reduce-scatter would.
    assert sent['all-reduce'] == 2 * matrices * share
    assert costs.flops == 3 * 2 * (2 * B * T * D * F) * L / DEVICES
    assert {collective.group for collective in costs.collectives} == {DEVICES}
    assert {collective.runs for collective in costs.collectives} == {L}


def test_every_kind_written_by_hand_is_counted_as_a_ring_sends_it():
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    size = 4 * 64 * 8  # bytes of one device's part

    def body(x):
        gathered = jax.lax.all_gather(x, 'fsdp', tiled=True)
        scattered = jax.lax.psum_scatter(gathered, 'fsdp', tiled=True)
        summed = jax.lax.psum(scattered, ('data', 'fsdp'))
        swapped = jax.lax.all_to_all(jnp.sin(summed) + x, 'fsdp', 0, 0, tiled=True)
        ring = [(i, (i + 1) % 4) for i in range(4)]
        moved = jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.ppermute(x, 'fsdp', ring), swapped)
        return moved

    x = jax.ShapeDtypeStruct((8 * 64, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(('data', 'fsdp'))))
    spec = PartitionSpec(('data', 'fsdp'))
    program = compiled(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec), x)
    sent = hlo.costs(program.as_text()).bytes_by_kind()
    assert sent == {
        'all-gather': 3 * size,
        'reduce-scatter': 3 / 4 * 4 * size,
        'all-reduce': 2 * 7 / 8 * size,
        'all-to-all': 3 / 4 * size,
        'collective-permute': 3 * size,
    }


# Lines as the compiler for TPUs writes them, metadata left out.
TPU = """HloModule jit_step, is_scheduled=true, num_partitions=64

%add.clone (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %add.1 = f32[]{:T(128)} add(%x, %y)
}

%all-reduce-scatter.3 (p.1: f32[4096,1024]) -> f32[64,1024] {
  %p.1 = f32[4096,1024]{1,0:T(8,128)} parameter(0)
  %all-reduce.5 = f32[4096,1024]{1,0:T(8,128)} all-reduce(%p.1), channel_id=4, replica_groups=[1,64]<=[64], to_apply=%add.clone
  %zero = s32[]{:T(128)} constant(0)
  ROOT %dynamic-slice.1 = f32[64,1024]{1,0:T(8,128)} dynamic-slice(%all-reduce.5, %zero, %zero), dynamic_slice_sizes={64,1024}
}

%fused (a: bf16[4096,1,4096], b: bf16[4096,32,128]) -> f32[4096,32,128] {
  %a = bf16[4096,1,4096]{2,0,1:T(8,128)} parameter(0)
  %b = bf16[4096,32,128]{2,0,1:T(8,128)} parameter(1)
  %bitcast.1 = bf16[4096,4096,1]{1,0,2:T(8,128)} bitcast(%a)
  ROOT %convolution.89 = f32[4096,32,128]{2,0,1:T(8,128)} convolution(%bitcast.1, %b), window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=bf0_i0o->b0f
}

%begins (p.2: bf16[64,512]) -> (bf16[64,512], bf16[1024,512], u32[]) {
  %p.2 = bf16[64,512]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.7 = bf16[1024,512]{1,0:T(8,128)(2,1)} all-gather(%p.2), channel_id=7, replica_groups=mesh['axis_0'=16,'axis_1'=1,'axis_2'=4], device_ids=([16,4]T(1,0)) {'axis_0'}, dimensions={0}
  ROOT %custom-call.7 = (bf16[64,512]{1,0:T(8,128)(2,1)}, bf16[1024,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) custom-call(%all-gather.7), custom_call_target="AsyncCollectiveStart"
}

%ends (p.3: bf16[64,512], p.4: bf16[1024,512], p.5: u32[]) -> bf16[1024,512] {
  %p.3 = bf16[64,512]{1,0:T(8,128)(2,1)} parameter(0)
  %p.4 = bf16[1024,512]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.8 = bf16[1024,512]{1,0:T(8,128)(2,1)} all-gather(%p.3), channel_id=7, replica_groups=mesh['axis_0'=16,'axis_1'=1,'axis_2'=4], device_ids=([16,4]T(1,0)) {'axis_0'}, dimensions={0}
  %p.5 = u32[]{:S(2)} parameter(2)
  ROOT %custom-call.8 = bf16[1024,512]{1,0:T(8,128)(2,1)} custom-call(%all-gather.8, %p.4, %p.5), custom_call_target="AsyncCollectiveDone"
}

%sparse (p.6: f32[128,512]) -> f32[2,512] {
  %p.6 = f32[128,512]{1,0:T(8,128)} parameter(0)
  ROOT %reduce-scatter.9 = f32[2,512]{1,0:T(8,128)} reduce-scatter(%p.6), channel_id=9, replica_groups=[1,64]<=[64], dimensions={0}, to_apply=%add.clone
}

%body (t.1: (s32[], f32[4096,1024])) -> (s32[], f32[4096,1024]) {
  %t.1 = (s32[]{:T(128)}, f32[4096,1024]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  %w.1 = f32[4096,1024]{1,0:T(8,128)} get-tuple-element(%t.1), index=1
  %part = bf16[64,1024]{1,0:T(8,128)(2,1)} constant({...})
  %all-gather-start.2 = (bf16[64,1024]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}) all-gather-start(%part), channel_id=1, replica_groups=mesh['axis_0'=64,'axis_1'=1] {'axis_0'}, dimensions={0}, use_global_device_ids=true
  %all-gather-done.2 = bf16[4096,1024]{1,0:T(8,128)(2,1)} all-gather-done(%all-gather-start.2)
  %piece = bf16[64,512]{1,0:T(8,128)(2,1)} constant({...})
  %begun = (bf16[64,512]{1,0:T(8,128)(2,1)}, bf16[1024,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) fusion(%piece), kind=kOutput, calls=%begins
  %kept.1 = bf16[64,512]{1,0:T(8,128)(2,1)} get-tuple-element(%begun), index=0
  %kept.2 = bf16[1024,512]{1,0:T(8,128)(2,1)} get-tuple-element(%begun), index=1
  %kept.3 = u32[]{:S(2)} get-tuple-element(%begun), index=2
  %ended = bf16[1024,512]{1,0:T(8,128)(2,1)} fusion(%kept.1, %kept.2, %kept.3), kind=kOutput, calls=%ends
  %sums = f32[128,512]{1,0:T(8,128)} constant({...})
  %sparse-start = ((f32[128,512]{1,0:T(8,128)}), f32[2,512]{1,0:T(8,128)}) call-start(%sums), async_execution_thread="sparsecore", to_apply=%sparse
  %scattered = f32[64,1024]{1,0:T(8,128)} fusion(%w.1), kind=kCustom, calls=%all-reduce-scatter.3
  %sum = (f32[4096]{0:T(1024)}, f32[]{:T(128)}) all-reduce(%vector, %number), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add.clone
  %q = bf16[4096,1,4096]{2,0,1:T(8,128)} constant({...})
  %k = bf16[4096,32,128]{2,0,1:T(8,128)} constant({...})
  %fusion.7 = f32[4096,32,128]{2,0,1:T(8,128)} fusion(%q, %k), kind=kOutput, calls=%fused
  %vector = f32[4096]{0:T(1024)} constant({...})
  %number = f32[]{:T(128)} constant(1)
  %splash_mha_fwd_segmented_residuals.1 = (f32[512,128]{1,0:T(8,128)}, bf16[32,4096,128]{2,1,0:T(8,128)(2,1)}, /*index=2*/f32[32,4096,128]{2,1,0:T(8,128)}) custom-call(%q, %k, /*index=2*/%part), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,8,8]{2,1,0}}
  ROOT %out = (s32[]{:T(128)}, f32[4096,1024]{1,0:T(8,128)}) tuple(%i.1, %w.1)
}

%condition (t.2: (s32[], f32[4096,1024])) -> pred[] {
  %limit = s32[]{:T(128)} constant(80)
  %t.2 = (s32[]{:T(128)}, f32[4096,1024]{1,0:T(8,128)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%t.2), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.2, %limit), direction=LT
}

ENTRY %main.9 (w.2: f32[4096,1024]) -> f32[4096,1024] {
  %w.2 = f32[4096,1024]{1,0:T(8,128)} parameter(0)
  %begin = s32[]{:T(128)} constant(0)
  %copy.1 = s32[]{:T(128)} copy(%begin)
  %tuple.1 = (s32[]{:T(128)}, f32[4096,1024]{1,0:T(8,128)}) tuple(%copy.1, %w.2)
  %while.1 = (s32[]{:T(128)}, f32[4096,1024]{1,0:T(8,128)}) while(%tuple.1), condition=%condition, body=%body
  ROOT %result = f32[4096,1024]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
}
"""  # noqa: E501


def test_forms_which_only_compilers_for_tpus_write_are_read():
    costs = hlo.costs(TPU)
    assert costs.unbounded == ()
    # A product with 32 heads of 128 written as a convolution, whose padding meets one position of 32 at a time.
    assert costs.flops == 80 * 2 * 4096 * 4096 * 32 * 128
    assert costs.kernels == {'splash_mha_fwd_segmented_residuals': 80}
    assert costs.bytes_by_kind() == {
        # The second is one operation, begun in one fusion and ended in another.
        'all-gather': 80 * (63 * 64 * 1024 + 15 * 64 * 512) * 2,
        'reduce-scatter': 80 * 63 / 64 * (4096 * 1024 + 128 * 512) * 4,
        'all-reduce': 80 * 2 * 1 / 2 * (4096 * 4 + 4),
    }
    assert sorted(collective.group for collective in costs.collectives) == [2, 16, 64, 64, 64]


def test_a_loop_whose_first_step_is_taken_out_runs_once_less():
    peeled = hlo.costs(TPU.replace('%begin = s32[]{:T(128)} constant(0)', '%begin = s32[]{:T(128)} constant(1)'))
    assert peeled.unbounded == () and peeled.flops == 79 * 2 * 4096 * 4096 * 32 * 128


def test_a_loop_of_unknown_length_is_counted_once_and_named():
    costs = hlo.costs(TPU.replace('direction=LT', 'direction=NE'))
    assert costs.unbounded == ('while.1',)
    assert costs.flops == 2 * 4096 * 4096 * 32 * 128
    assert hlo.costs(TPU.replace('constant(0)', 'constant(3)')).unbounded == ('while.1',)


def test_of_branches_the_dearest_counts():
    def choose(flag, x, w):
        return jax.lax.cond(flag, lambda x: (x @ w) @ w, lambda x: x @ w, x)

    arguments = jax.ShapeDtypeStruct((), bool), *(jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(2))
    assert hlo.costs(compiled(choose, *arguments).as_text()).flops == 2 * 2 * 8**3


def test_valid_pairs_of_a_convolution_are_those_a_loop_finds():
    """Padding, strides, holes between inputs, holes between kernel elements: all that products become on TPUs."""
    for size, kernel, stride, low, high, spread, dilation in [
        (5, 3, 1, 0, 0, 1, 1), (5, 3, 2, 1, 1, 1, 1), (4, 4, 3, 0, 0, 4, 1), (1, 6, 1, 5, 5, 1, 1),
        (6, 2, 1, 2, 0, 2, 3),
    ]:  # fmt: skip
        holes = np.zeros((size - 1) * spread + 1, int)
        holes[::spread] = 1
        padded = np.pad(holes, (low, high))
        reach = (kernel - 1) * dilation + 1
        output = (len(padded) - reach) // stride + 1
        expected = sum(padded[o * stride + k * dilation] for o in range(output) for k in range(kernel))
        found = hlo._valid_pairs(size, kernel, output, stride=stride, low=low, spread=spread, dilation=dilation)
        assert found == expected > 0


def test_text_which_is_no_program_is_refused():
    with pytest.raises(ValueError, match='no ENTRY computation'):
        hlo.parse('nothing')
