"""Programs compiled by libtpu for topologies of TPUs; no TPU is there, and the extra `tpu` is needed."""

import json

import pytest

pytest.importorskip('libtpu', reason='compiles for TPUs: needs the extra `tpu`')

from tests.golden import pods
from transformer_jax.analysis.ahead_of_time import Plan
from transformer_jax.analysis.chips import parse_topology, topology_devices
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.sharding import MeshConfig
from transformer_jax.training.config import Experiment, TrainingConfig

pytestmark = pytest.mark.tpu

ROWS, T, V, D, F, L, N = 4, 256, 512, 256, 512, 2, 2


def experiment(**changes):
    model = ModelConfig(
        kind='decoder', vocab_size=V, d_model=D, d_ff=F, num_layers=L, num_heads=N, position='rope', norm='rms',
        norm_position='pre', ffn='gated_silu', ffn_bias=False, embedding_scale='none', tie_embeddings='none',
        dropout=0.0, dtype='bfloat16',
    ).replace(**changes)  # fmt: skip
    return Experiment(
        model=model,
        data=DataConfig(
            objective='causal_lm', train='moby_dick', vocab_size=V, target_length=T, batch_tokens=ROWS * T,
            row_multiple=ROWS,
        ),
        training=TrainingConfig(label_smoothing=0.0),
        decode=DecodeConfig(max_new_tokens=128),
        mesh=MeshConfig(data=1, fsdp=4),
    )  # fmt: skip


def test_a_train_step_for_tpus_runs_splash_kernels_and_has_the_models_flops_outside_them():
    report = Plan(experiment(), parse_topology('v5e:2x2')).report('train')
    assert {name.split('_')[2] for name in report.kernels} == {'fwd', 'dq', 'dkv'}
    assert set(report.kernels.values()) == {L}
    tokens = ROWS * T / 4
    assert report.model_flops == 3 * tokens * 2 * (L * (4 * D * D + 3 * D * F) + D * V)
    assert report.flops_ratio <= 1.05
    # One forward of two products and a backward of seven, over the pairs which a causal mask shows.
    assert report.kernel_flops == pytest.approx(9 / 6 * report.attention_flops)
    assert report.fits and report.unbounded_loops == 0


def test_a_topology_which_libtpu_does_not_know_is_refused_in_words():
    with pytest.raises(UserError, match="libtpu does not know the topology 'v5e:3x5'"):
        topology_devices(parse_topology('v5e:3x5'))


@pytest.mark.parametrize('name', pods.CASES)
def test_no_case_of_the_golden_file_costs_more_than_it_did(name):
    golden, found = json.loads(pods.GOLDEN.read_text())[name], pods.compile_case(name)
    for field in ('peak_bytes', 'compiled_flops', 'kernel_flops', 'bytes_ratio'):
        assert found[field] <= 1.01 * golden[field], field
    assert set(found['sent_bytes']) <= set(golden['sent_bytes'])
