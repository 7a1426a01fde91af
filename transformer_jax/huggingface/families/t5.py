"""T5 and T5 v1.1 (Flan): RMS norms, no biases, shared tables of relative positions, unscaled dot products."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.huggingface.family import ACTIVATIONS, GATED, Derived, Family, Field, Fields, Weight

_PROJECTIONS = (('q', 'query', '(N H) D -> D N H'), ('k', 'key', '(N H) D -> D N H'),
                ('v', 'value', '(N H) D -> D N H'), ('o', 'out', 'D (N H) -> N H D'))  # fmt: skip


def _attention(theirs: str, ours: str, residual: str, module: str) -> tuple[Weight, ...]:
    rows = [Weight(f'{theirs}{module}.{q}.weight', f'{ours}/{own}/kernel', axes) for q, own, axes in _PROJECTIONS]
    return *rows, Weight(theirs + 'layer_norm.weight', residual + '/in_norm/scale', 'D')


def _stack(stack: str) -> tuple[Weight, ...]:
    theirs, ours = f'{stack}.block.{{i}}.layer.', f'{stack}/layers_{{i}}/'
    bias = f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
    cross = _attention(theirs + '1.', ours + 'cross_attention', ours + 'cross_attention_residual', 'EncDecAttention')
    ffn = theirs + ('1.' if stack == 'encoder' else '2.')
    gate = 'encoder/layers_0/ffn/gate'
    return (
        Weight(bias, f'{stack}/relative_bias', 'B N'),
        *_attention(theirs + '0.', ours + 'attention', ours + 'attention_residual', 'SelfAttention'),
        *(cross if stack == 'decoder' else ()),
        Weight(ffn + 'DenseReluDense.wi.weight', ours + 'ffn/up/kernel', 'F D -> D F', unless=gate),
        Weight(ffn + 'DenseReluDense.wi_0.weight', ours + 'ffn/gate/kernel', 'F D -> D F'),
        Weight(ffn + 'DenseReluDense.wi_1.weight', ours + 'ffn/up/kernel', 'F D -> D F', given=gate),
        Weight(ffn + 'DenseReluDense.wo.weight', ours + 'ffn/down/kernel', 'D F -> F D'),
        Weight(ffn + 'layer_norm.weight', ours + 'ffn_residual/in_norm/scale', 'D'),
        Weight(f'{stack}.final_layer_norm.weight', f'{stack}/final_norm/scale', 'D'),
    )


_ACTIVATIONS = ACTIVATIONS | {f'gated-{name}': ours for name, ours in GATED.items()} | {'gated-gelu': 'gated_gelu_tanh'}


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    # v1.1 has an output matrix of its own and does not scale what goes into it; files written by transformers 5 say
    # the second in a field of its own, and tie_word_embeddings = true in any case.
    said = fields.get('tie_word_embeddings')
    scaled = fields.get('scale_decoder_outputs', said is not False)
    own_matrix = 'lm_head.weight' in names and not scaled
    choices = {'tie_embeddings': 'inputs' if own_matrix else 'all'}
    return choices | {'logits_scale': fields['d_model'] ** -0.5 if scaled else 1.0}


def _write(config: ModelConfig) -> Fields:
    scaled = config.logits_scale != 1.0
    dropout = {'dropout_rate': config.dropout}
    return dropout | {'tie_word_embeddings': scaled, 'scale_decoder_outputs': scaled, 'is_encoder_decoder': True}


T5 = Family(
    model_type='t5',
    architectures={'T5ForConditionalGeneration': {'head': 'lm'}, 'T5Model': {'head': 'none'}},
    base_prefix='',
    choices=dict(
        kind='encoder_decoder', position='relative', norm='rms', norm_position='pre', embedding_scale='none',
        attention_scale=1.0, qkv_bias=False, out_bias=False, ffn_bias=False,
    ),
    fields=(
        Field('vocab_size', 'vocab_size'),
        Field('d_model', 'd_model'),
        Field('d_kv', 'd_k'),
        Field('d_ff', 'd_ff'),
        Field('num_layers', 'num_layers'),
        Field('num_decoder_layers', 'num_decoder_layers', None),
        Field('num_heads', 'num_heads'),
        Field('relative_attention_num_buckets', 'relative_buckets', 32),
        Field('relative_attention_max_distance', 'relative_max_distance', 128),
        Field('dropout_rate', 'dropout', 0.1),
        Field('dropout_rate', 'attention_dropout', 0.1),
        Field('dropout_rate', 'ffn_dropout', 0.1),
        Field('layer_norm_epsilon', 'norm_epsilon', 1e-6),
        Field('feed_forward_proj', 'ffn', 'relu', _ACTIVATIONS),
    ),
    weights=(
        Weight('shared.weight', 'embedding/embedding', 'V D'),
        *_stack('encoder'),
        *_stack('decoder'),
        Weight('lm_head.weight', 'head/output/kernel', 'V D -> D V'),
    ),
    derived=(
        Derived(r'(en|de)coder\.embed_tokens\.weight', 'tied to the shared embedding', tied_to='shared.weight'),
        Derived(r'lm_head\.weight', 'tied to the shared embedding', tied_to='shared.weight'),
        Derived(r'decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight', 'not in use'),
    ),
    ignored=('dense_act_fn', 'is_gated_act', 'n_positions'),
    known=('tie_word_embeddings', 'scale_decoder_outputs'),
    read=_read,
    write=_write,
)  # fmt: skip
