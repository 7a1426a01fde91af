"""Reports of a run's programs, compiled here for eight CPU devices in place of chips, against formulas."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.analysis import required
from transformer_jax.analysis.ahead_of_time import Plan, abstract_batch, mesh_shapes
from transformer_jax.analysis.chips import CHIPS, Topology, parse_topology
from transformer_jax.analysis.report import full_text, table
from transformer_jax.analysis.required import Lengths
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.models import abstract_params, build, count_params
from transformer_jax.ops.masks import Mask
from transformer_jax.sharding import MeshConfig, make_mesh, resolve
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig

ROWS, T, V, D, F, L, N = 8, 32, 64, 16, 48, 3, 4
EIGHT = Topology('v5e:2x4', CHIPS['v5e'], 8)


def decoder(**changes):
    return ModelConfig(
        kind='decoder', vocab_size=V, d_model=D, d_ff=F, num_layers=L, num_heads=N, num_kv_heads=2, position='rope',
        norm='rms', norm_position='pre', ffn='gated_silu', ffn_bias=False, embedding_scale='none',
        tie_embeddings='none', dropout=0.0,
    ).replace(**changes)  # fmt: skip


def experiment(model=None, **mesh):
    return Experiment(
        model=model or decoder(),
        data=DataConfig(objective='causal_lm', train='moby_dick', vocab_size=V, target_length=T, batch_tokens=ROWS * T),
        optimizer=OptimizerConfig(),
        training=TrainingConfig(label_smoothing=0.0),
        decode=DecodeConfig(max_new_tokens=16),
        mesh=MeshConfig(**(mesh or dict(data=1, fsdp=8))),
    )


# Products of one token outside attention: queries and outputs, keys and values of two heads of four, three of the
# gated feed-forward layer, and the logits.
OUTSIDE = 2 * (L * (2 * D * D + 2 * D * D // 2 + 3 * D * F) + D * V)


@pytest.fixture(scope='module')
def plain():
    return Plan(experiment(), EIGHT, jax.devices()).report('train')


def test_a_train_step_has_the_models_flops_and_no_others(plain):
    """One row a device: three times the forward products; on this platform attention is XLA's, all pairs computed."""
    assert plain.model_flops == 3 * OUTSIDE * T
    assert plain.attention_flops == 3 * L * 2 * 2 * D * (T * (T + 1) // 2)
    dense = 3 * L * 2 * 2 * D * T * T
    assert plain.compiled_flops == plain.model_flops + dense
    assert plain.flops_ratio == plain.compiled_flops / (plain.model_flops + plain.attention_flops)
    assert plain.kernels == {} and plain.kernel_flops == 0 and plain.unbounded_loops == 0


def test_memory_of_a_train_step_is_that_of_its_arrays(plain):
    count = count_params(abstract_params(build(decoder()))[0])
    assert plain.parameter_bytes == 4 * count / 8
    assert plain.optimizer_bytes == 2 * 4 * count / 8 + 2 * 4  # two moments, two counters
    assert plain.peak_bytes > plain.parameter_bytes + plain.optimizer_bytes + plain.temporary_bytes
    assert plain.fits and plain.mesh == {'fsdp': 8}


def test_recomputation_shows_as_compiled_flops_beyond_the_models(plain):
    """Everything of a layer but its last product is computed once more; logits are outside the layers."""
    full = Plan(experiment(decoder(remat='full')), EIGHT, jax.devices()).report('train')
    extra = (full.compiled_flops - plain.compiled_flops) / T
    layers = OUTSIDE - 2 * D * V + L * 2 * 2 * D * T
    assert layers - L * 2 * D * F <= extra <= layers
    assert full.model_flops == plain.model_flops


def test_prefill_and_decode_have_the_products_of_their_tokens():
    plan = Plan(experiment(), EIGHT, jax.devices())
    prompt, step = plan.report('prefill'), plan.report('decode')
    head = 2 * D * V
    assert prompt.model_flops == (OUTSIDE - head) * T + head  # logits of the last token only
    assert step.model_flops == OUTSIDE
    assert prompt.attention_flops == L * 2 * 2 * D * (T * (T + 1) // 2)
    assert step.attention_flops == L * 2 * 2 * D * (T + 1)
    for report in (prompt, step):
        assert report.compiled_flops >= report.model_flops
        assert report.cache_bytes > 2 * L * (T + 16) * D // 2 * 4
        assert report.optimizer_bytes == 0 and 'gradients' in report.least_bytes
        assert report.least_bytes['gradients'] == 0


@pytest.mark.parametrize('window', [None, 5])
@pytest.mark.parametrize('causal', [True, False])
def test_visible_pairs_are_those_of_the_mask(window, causal):
    config = ModelConfig(
        kind='decoder' if causal else 'encoder', d_model=D, num_heads=N, num_layers=1, window=window,
        layer_pattern=('local',) if window else ('global',), tie_embeddings='none',
    )  # fmt: skip
    for length in ((12, 12), (1, 9), (4, 10)):
        mask = Mask(causal=causal, window=window).visible(*length)
        pairs = int(np.prod(length)) if mask is None else int(np.asarray(mask).sum())
        found = required.attention_flops(config, 3, Lengths(**{config.kind: length}), visible=True)
        assert found == 2 * 2 * 3 * D * pairs
        dense = required.attention_flops(config, 3, Lengths(**{config.kind: length}), visible=False)
        assert dense == 2 * 2 * 3 * D * np.prod(length)


def least(mesh_config, training=True, **changes):
    config = decoder(dtype='bfloat16', **changes)
    mesh = make_mesh(mesh_config)
    params, axes = abstract_params(build(config))
    return required.least_bytes(config, params, resolve(params, axes, mesh), mesh, ROWS, (T,), training), params


def test_least_bytes_of_fsdp_are_two_gathers_in_bf16_and_one_scatter_in_fp32():
    found, params = least(MeshConfig(data=1, fsdp=8))
    count = count_params(params)
    assert found == {'parameters': 7 / 8 * 2 * 2 * count, 'gradients': 7 / 8 * 4 * count, 'activations': 0}
    forward, _ = least(MeshConfig(data=1, fsdp=8), training=False)
    assert forward == {'parameters': 7 / 8 * 2 * count, 'gradients': 0, 'activations': 0}


def test_least_bytes_of_copies_are_one_all_reduce_and_of_tensors_the_partial_sums():
    found, params = least(MeshConfig(data=8))
    assert found == {'parameters': 0, 'gradients': 2 * 7 / 8 * 4 * count_params(params), 'activations': 0}
    found, _ = least(MeshConfig(data=4, tensor=2))
    # Two sublayers a layer, two directions, an all-reduce of two rows of bf16 each.
    assert found['activations'] == L * 2 * 2 * 2 * (1 / 2) * (2 * T * D * 2)


@pytest.mark.parametrize('objective, kind, names', [
    ('translation', 'encoder_decoder', 'source_tokens target_tokens source_mask target_mask source_positions '
     'target_positions source_segment_ids target_segment_ids'),
    ('causal_lm', 'decoder', 'tokens mask positions segment_ids'),
    ('masked_lm', 'encoder', 'tokens mask positions segment_ids'),
])  # fmt: skip
def test_shapes_of_a_batch_are_known_without_data(objective, kind, names):
    model = decoder(kind=kind, ffn='relu')
    data = DataConfig(objective=objective, vocab_size=V, source_length=24, target_length=T, batch_tokens=1024)
    batch = abstract_batch(Experiment(model=model, data=data))
    rows = {'translation': 16, 'causal_lm': 32, 'masked_lm': 40}[objective]
    assert set(batch['inputs']) == set(names.split())
    assert {leaf.shape[0] for leaf in jax.tree.leaves(batch)} == {rows}
    assert batch['labels'].dtype == jnp.int32 and batch['weights'].dtype == jnp.float32


def test_a_report_is_text_a_row_of_a_table_and_json(plain):
    text = full_text(plain)
    assert 'train, 8 rows of 32 on v5e:2x4' in text and 'fsdp 8' in text and 'MFU (estimate)' in text
    assert ': fits' in text and 'optimizer state' in text and 'cache' not in text
    small = dataclasses.replace(plain, chip=dataclasses.replace(plain.chip, hbm_bytes=100))
    assert 'DOES NOT FIT' in full_text(small)
    header, row, other = table([plain, small]).splitlines()
    assert header.split()[0] == 'mesh' and ' yes ' in row and ' no ' in other
    values = json.loads(json.dumps(plain.to_dict()))
    assert values['flops_ratio'] == plain.flops_ratio and values['chip'] == 'v5e' and values['fits'] is True
    assert plain.step_seconds == max(plain.compute_seconds, plain.memory_seconds, plain.link_seconds)


def test_meshes_of_a_sweep_use_every_chip():
    shapes = list(mesh_shapes(64))
    assert len(shapes) == len(set(shapes)) > 10
    assert all(shape.data * shape.fsdp * shape.tensor == 64 and shape.tensor <= 16 for shape in shapes)
    assert MeshConfig(data=1, fsdp=64) in shapes and MeshConfig(data=64, fsdp=1) in shapes


@pytest.mark.parametrize('name, message', [
    ('v5e', "'v5e' is no topology; write chip:grid"),
    ('v5:4x4', "chip of --topology = 'v5' is unknown; did you mean 'v5"),
])  # fmt: skip
def test_a_wrong_topology_is_refused_in_words(name, message):
    with pytest.raises(UserError, match=message):
        parse_topology(name)
    assert parse_topology('v5p:4x8x8').chips == 256


def test_a_program_which_a_model_has_not_is_refused_in_words():
    plan = Plan(experiment(), EIGHT, jax.devices())
    with pytest.raises(UserError, match="'prefil' is unknown; did you mean 'prefill'"):
        plan.report('prefil')
    encoder = experiment(decoder(kind='encoder'))
    with pytest.raises(UserError, match="kind 'encoder' has no 'decode' program"):
        Plan(encoder, EIGHT, jax.devices()).report('decode')
