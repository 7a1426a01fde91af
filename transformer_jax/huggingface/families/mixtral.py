"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.huggingface import rope
from transformer_jax.huggingface.families import llama
from transformer_jax.huggingface.family import Family, Fields, Weight, with_defaults
from transformer_jax.subconfigs import MixtureConfig

_MOE, _OURS = llama.LAYER + 'block_sparse_moe.', llama.OURS + 'ffn/'


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    window = fields.get('sliding_window')
    local = {} if window is None else {'window': window, 'layer_pattern': ('local',)}
    mixture = MixtureConfig(fields.get('num_local_experts', 8), fields.get('num_experts_per_tok', 2))
    return llama.read({'rope_theta': 1e6} | fields, names) | local | {'mixture': mixture}


def _write(config: ModelConfig) -> Fields:
    fields = llama.write(config) | {'sliding_window': config.window}
    if config.mixture is None:
        return fields
    E, k = config.mixture.num_experts, config.mixture.experts_per_token
    return fields | {'num_local_experts': E, 'num_experts_per_tok': k}


MIXTRAL = Family(
    model_type='mixtral',
    architectures={'MixtralForCausalLM': {'head': 'lm'}, 'MixtralModel': {'head': 'none'}},
    base_prefix='model.',
    choices=llama.CHOICES | dict(qkv_bias=False, out_bias=False, ffn_bias=False),
    fields=with_defaults(llama.FIELDS, num_key_value_heads=8, rms_norm_eps=1e-5),
    weights=(
        *(row for row in llama.WEIGHTS if '.mlp.' not in row.theirs),
        Weight(_MOE + 'gate.weight', _OURS + 'router/linear/kernel', 'E D -> D E'),
        Weight(_MOE + 'experts.{e}.w1.weight', _OURS + 'experts_gate/kernel', 'F D -> D F'),
        Weight(_MOE + 'experts.{e}.w3.weight', _OURS + 'experts_up/kernel', 'F D -> D F'),
        Weight(_MOE + 'experts.{e}.w2.weight', _OURS + 'experts_down/kernel', 'D F -> F D'),
    ),
    derived=llama.DERIVED,
    # Training alone reads these: `mixture.balance_loss` is ours.
    ignored=('router_aux_loss_coef', 'router_jitter_noise', 'output_router_logits'),
    known=(*rope.KNOWN, 'sliding_window', 'num_local_experts', 'num_experts_per_tok'),
    read=_read,
    write=_write,
)
