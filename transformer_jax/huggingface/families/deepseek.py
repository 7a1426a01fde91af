"""DeepSeek-V2 and V3: latent attention, and a mixture of experts after the first dense layers."""

from __future__ import annotations

from typing import Any

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface import rope
from transformer_jax.huggingface.families import llama
from transformer_jax.huggingface.family import GATED, Derived, Family, Field, Fields, Weight
from transformer_jax.ops.rope import yarn_temperature
from transformer_jax.subconfigs import LatentConfig, MixtureConfig

_LAYER, _OURS = llama.LAYER, llama.OURS
_THEIR_ATTENTION, _ATTENTION = _LAYER + 'self_attn.', _OURS + 'attention/'
_THEIR_MLP, _MLP = _LAYER + 'mlp.', _OURS + 'ffn/'

_OWN = (
    Weight(_THEIR_ATTENTION + 'q_a_proj.weight', _ATTENTION + 'query_down/kernel', 'R D -> D R'),
    Weight(_THEIR_ATTENTION + 'q_a_proj.bias', _ATTENTION + 'query_down/bias', 'R'),
    Weight(_THEIR_ATTENTION + 'q_a_layernorm.weight', _ATTENTION + 'query_norm/scale', 'R'),
    Weight(_THEIR_ATTENTION + 'q_b_proj.weight', _ATTENTION + 'query_up/kernel', '(N H) R -> R N H'),
    Weight(_THEIR_ATTENTION + 'kv_a_proj_with_mqa.weight', _ATTENTION + 'down/kernel', 'R D -> D R'),
    Weight(_THEIR_ATTENTION + 'kv_a_proj_with_mqa.bias', _ATTENTION + 'down/bias', 'R'),
    Weight(_THEIR_ATTENTION + 'kv_a_layernorm.weight', _ATTENTION + 'latent_norm/scale', 'R'),
    Weight(_THEIR_ATTENTION + 'kv_b_proj.weight', _ATTENTION + 'up/kernel', '(N H) R -> R N H'),
    Weight(_THEIR_MLP + 'gate.weight', _MLP + 'router/linear/kernel', 'E D -> D E'),
    Weight(_THEIR_MLP + 'gate.e_score_correction_bias', _MLP + 'router/bias', 'E'),
    Weight(_THEIR_MLP + 'experts.{e}.gate_proj.weight', _MLP + 'experts_gate/kernel', 'F D -> D F'),
    Weight(_THEIR_MLP + 'experts.{e}.up_proj.weight', _MLP + 'experts_up/kernel', 'F D -> D F'),
    Weight(_THEIR_MLP + 'experts.{e}.down_proj.weight', _MLP + 'experts_down/kernel', 'D F -> F D'),
    Weight(_THEIR_MLP + 'shared_experts.gate_proj.weight', _MLP + 'shared/gate/kernel', 'F D -> D F'),
    Weight(_THEIR_MLP + 'shared_experts.up_proj.weight', _MLP + 'shared/up/kernel', 'F D -> D F'),
    Weight(_THEIR_MLP + 'shared_experts.down_proj.weight', _MLP + 'shared/down/kernel', 'D F -> F D'),
)

_FIELDS = (
    *llama.SIZES,
    *llama.BIASES,
    Field('v_head_dim', 'd_v', 128),
    Field('hidden_act', 'ffn', 'silu', GATED),
    Field('tie_word_embeddings', 'tie_embeddings', False, {True: 'output', False: 'none'}),
    # Transformers gives the norms of latents this epsilon whatever the field says.
    Field('rms_norm_eps', 'norm_epsilon', 1e-6, {1e-6: 1e-6}),
)

# What config.json says of the mixture beside its groups: theirs -> ours.
_MIXTURE = {
    'n_routed_experts': 'num_experts', 'num_experts_per_tok': 'experts_per_token', 'moe_intermediate_size': 'd_ff',
    'n_shared_experts': 'shared_experts', 'routed_scaling_factor': 'scale', 'first_k_dense_replace': 'dense_layers',
}  # fmt: skip
_LATENT = {'kv_lora_rank': 'kv_rank', 'q_lora_rank': 'query_rank', 'qk_rope_head_dim': 'rotary_dim'}
_GROUPS = {'n_group': 'groups', 'topk_group': 'groups_per_token'}

_KNOWN = (*rope.KNOWN, *_MIXTURE, *_LATENT, *_GROUPS, 'qk_nope_head_dim', 'num_key_value_heads', 'head_dim',
          'qk_head_dim')  # fmt: skip
# Code beside the released files is never run; what it computes is what stands here.
_IGNORED = ('auto_map', 'aux_loss_alpha', 'seq_aux', 'ep_size', 'output_router_logits', 'num_nextn_predict_layers')
_DERIVED = (
    *llama.DERIVED,
    Derived(r'model\.layers\.61\..*', 'predicts a second token in training, as transformers leaves it out'),
)


def _read(fields: Fields, defaults: Fields, **mixture: Any) -> Fields:
    """Returns what config.json says in fields which are no choice of their own here."""
    fields = defaults | fields
    N, heads = fields['num_attention_heads'], fields.get('num_key_value_heads')
    if heads not in (None, N):
        raise UserError(f'num_key_value_heads = {heads} is not supported; latent attention has {N}, one per head')
    latent = LatentConfig(**{ours: fields[theirs] for theirs, ours in _LATENT.items()})
    d_k = fields['qk_nope_head_dim'] + latent.rotary_dim
    choices = rope.read_rope(fields)
    scaling, scale = choices['rope_scaling'], None
    if scaling is not None and scaling.mscale_all_dim:
        scale = d_k**-0.5 * yarn_temperature(scaling.factor, scaling.mscale_all_dim) ** 2
    stated = {ours: fields[theirs] for theirs, ours in _MIXTURE.items()}
    own = {'latent': latent, 'd_k': d_k, 'attention_scale': scale, 'mixture': MixtureConfig(**stated | mixture)}
    return choices | own


def _write(config: ModelConfig) -> Fields:
    fields = rope.write_rope(config) | {'num_key_value_heads': config.num_heads}
    if config.latent is None or config.mixture is None:
        return fields
    fields |= {theirs: getattr(config.latent, ours) for theirs, ours in _LATENT.items()}
    fields |= {theirs: getattr(config.mixture, ours) for theirs, ours in (_MIXTURE | _GROUPS).items()}
    fields['moe_intermediate_size'] = config.mixture.d_ff or config.d_ff
    return fields | {'qk_nope_head_dim': config.key_dim - config.latent.rotary_dim}


_V2_DEFAULTS: Fields = dict(
    kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, n_routed_experts=64,
    num_experts_per_tok=None, moe_intermediate_size=1407, n_shared_experts=2, routed_scaling_factor=1.0,
    first_k_dense_replace=0, topk_method='greedy', max_position_embeddings=2048,
)  # fmt: skip
_V3_DEFAULTS: Fields = _V2_DEFAULTS | dict(
    n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
    routed_scaling_factor=2.5, first_k_dense_replace=3, n_group=8, topk_group=4, max_position_embeddings=4096,
)  # fmt: skip


def _read_v2(fields: Fields, names: frozenset[str]) -> Fields:
    groups: Fields = {}
    method = fields.get('topk_method') or 'greedy'
    if method == 'group_limited_greedy':
        groups = {'groups': fields['n_group'], 'groups_per_token': fields['topk_group']}
    elif method != 'greedy':
        raise UserError(f"topk_method = '{method}' is not supported; 'greedy' and 'group_limited_greedy' are")
    if fields.get('num_experts_per_tok') is None:
        raise UserError('config.json lacks num_experts_per_tok, which deepseek_v2 models state')
    return _read(fields, _V2_DEFAULTS, normalize=False, **groups)


def _write_v2(config: ModelConfig) -> Fields:
    limited = config.mixture is not None and config.mixture.groups > 1
    return _write(config) | {'topk_method': 'group_limited_greedy' if limited else 'greedy'}


def _read_v3(fields: Fields, names: frozenset[str]) -> Fields:
    known = _V3_DEFAULTS | fields
    return _read(
        fields, _V3_DEFAULTS, affinity='sigmoid', correction_bias=True, group_score='top_two',
        groups=known['n_group'], groups_per_token=known['topk_group'], normalize=known.get('norm_topk_prob', True),
    )  # fmt: skip


def _write_v3(config: ModelConfig) -> Fields:
    normalize = config.mixture is not None and config.mixture.normalize
    return _write(config) | {'norm_topk_prob': normalize, 'num_nextn_predict_layers': 0}


_CHOICES = llama.CHOICES | dict(ffn_bias=False)
# LLaMA's rows but for keys, values, and the norms of heads.
_OTHER = ('.k_proj.', '.v_proj.', '.q_norm.', '.k_norm.')
_WEIGHTS = tuple(row for row in llama.WEIGHTS if not any(name in row.theirs for name in _OTHER)) + _OWN

DEEPSEEK_V2 = Family(
    model_type='deepseek_v2',
    architectures={'DeepseekV2ForCausalLM': {'head': 'lm'}, 'DeepseekV2Model': {'head': 'none'}},
    base_prefix='model.',
    choices=_CHOICES | dict(rope_layout='interleaved'),
    fields=_FIELDS,
    weights=_WEIGHTS,
    derived=_DERIVED,
    fixed={'norm_topk_prob': False, 'scoring_func': 'softmax', 'moe_layer_freq': 1, 'mlp_bias': False},
    ignored=_IGNORED,
    known=(*_KNOWN, 'topk_method'),
    read=_read_v2,
    write=_write_v2,
)

DEEPSEEK_V3 = Family(
    model_type='deepseek_v3',
    architectures={'DeepseekV3ForCausalLM': {'head': 'lm'}, 'DeepseekV3Model': {'head': 'none'}},
    base_prefix='model.',
    choices=_CHOICES,
    fields=(*_FIELDS, Field('rope_interleave', 'rope_layout', True, {True: 'interleaved', False: 'half'})),
    weights=_WEIGHTS,
    derived=_DERIVED,
    fixed={'scoring_func': 'sigmoid', 'topk_method': 'noaux_tc', 'moe_layer_freq': 1},
    ignored=_IGNORED,
    known=(*_KNOWN, 'norm_topk_prob'),
    read=_read_v3,
    write=_write_v3,
)
