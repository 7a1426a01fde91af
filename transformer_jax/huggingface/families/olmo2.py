"""OLMo 2: LLaMA with norms after the sublayers instead of before, and over all queries and all keys."""

from __future__ import annotations

from transformer_jax.huggingface import rope
from transformer_jax.huggingface.families import llama
from transformer_jax.huggingface.family import Family, Weight, with_defaults

_LAYER, _OURS = llama.LAYER, llama.OURS

OLMO2 = Family(
    model_type='olmo2',
    architectures={'Olmo2ForCausalLM': {'head': 'lm'}, 'Olmo2Model': {'head': 'none'}},
    base_prefix='model.',
    choices=llama.CHOICES | dict(norm_position='res_post', qk_norm='full', ffn_bias=False),
    fields=with_defaults(llama.FIELDS + llama.BIASES, rms_norm_eps=1e-5),
    weights=llama.PROJECTIONS
    + (
        Weight(_LAYER + 'post_attention_layernorm.weight', _OURS + 'attention_residual/branch_norm/scale', 'D'),
        Weight(_LAYER + 'post_feedforward_layernorm.weight', _OURS + 'ffn_residual/branch_norm/scale', 'D'),
    ),
    derived=llama.DERIVED,
    known=rope.KNOWN,
    read=llama.read,
    write=llama.write,
)
