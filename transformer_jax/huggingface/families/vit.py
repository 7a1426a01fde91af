"""ViT: a pre-norm encoder of image patches, with a classifier on its class token or BERT's pooler."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface.families.bert import number_of_classes, write_classes
from transformer_jax.huggingface.family import ACTIVATIONS, Family, Field, Fields, Weight, norm_rows
from transformer_jax.subconfigs import PatchConfig

_LAYER, _OURS = 'vit.encoder.layer.{i}.', 'encoder/layers_{i}/'
_CLASSES = {'head': 'classes', 'pooling': 'first', 'head_activation': 'none'}


def _pair(size: int | list[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    width = fields.get('pooler_output_size')
    if width not in (None, fields['hidden_size']):
        raise UserError(f'pooler_output_size = {width} is not supported; only hidden_size is')
    image, patch = (_pair(fields.get(name, size)) for name, size in (('image_size', 224), ('patch_size', 16)))
    choices: Fields = {'patches': PatchConfig(image, patch, fields.get('num_channels', 3))}
    architecture = (fields.get('architectures') or ['ViTForImageClassification'])[0]
    if architecture == 'ViTForImageClassification':
        return choices | {'num_classes': number_of_classes(fields)}
    if 'vit.pooler.dense.weight' not in names:
        return choices | {'pooling': 'none', 'head_activation': 'none'}
    return choices


def _write(config: ModelConfig) -> Fields:
    if config.patches is None:
        return {}
    sizes = {'image_size': config.patches.image_size, 'patch_size': config.patches.patch_size}
    stated = {name: size[0] if size[0] == size[1] else list(size) for name, size in sizes.items()}
    return stated | {'num_channels': config.patches.channels} | write_classes(config)


VIT = Family(
    model_type='vit',
    architectures={
        'ViTForImageClassification': _CLASSES,
        'ViTModel': {'head': 'none', 'pooling': 'first', 'head_activation': 'tanh'},
    },
    base_prefix='vit.',
    choices=dict(
        kind='vision', position='learned', norm='layer', norm_position='pre', embedding_scale='none', out_bias=True,
        ffn_bias=True, head_bias=True, tie_embeddings='none',
    ),
    fields=(
        Field('hidden_size', 'd_model'),
        Field('intermediate_size', 'd_ff'),
        Field('num_hidden_layers', 'num_layers'),
        Field('num_attention_heads', 'num_heads'),
        Field('hidden_act', 'ffn', 'gelu', ACTIVATIONS),
        Field('hidden_dropout_prob', 'dropout', 0.0),
        Field('attention_probs_dropout_prob', 'attention_dropout', 0.0),
        Field('layer_norm_eps', 'norm_epsilon', 1e-12),
        Field('qkv_bias', 'qkv_bias', True),
    ),
    weights=(
        Weight('vit.embeddings.cls_token', 'patches/class_token/embedding', '1 K D -> K D'),
        Weight('vit.embeddings.position_embeddings', 'embedder/position/embedding', '1 P D -> P D'),
        Weight('vit.embeddings.patch_embeddings.projection.weight', 'patches/projection/kernel', 'D C P Q -> P Q C D'),
        Weight('vit.embeddings.patch_embeddings.projection.bias', 'patches/projection/bias', 'D'),
        *(
            Weight(f'{_LAYER}attention.attention.{name}.{theirs}', f'{_OURS}attention/{name}/{ours}', axes)
            for name in ('query', 'key', 'value')
            for theirs, ours, axes in (('weight', 'kernel', '(N H) D -> D N H'), ('bias', 'bias', '(N H) -> N H'))
        ),
        Weight(_LAYER + 'attention.output.dense.weight', _OURS + 'attention/out/kernel', 'D (N H) -> N H D'),
        Weight(_LAYER + 'attention.output.dense.bias', _OURS + 'attention/out/bias', 'D'),
        Weight(_LAYER + 'intermediate.dense.weight', _OURS + 'ffn/up/kernel', 'F D -> D F'),
        Weight(_LAYER + 'intermediate.dense.bias', _OURS + 'ffn/up/bias', 'F'),
        Weight(_LAYER + 'output.dense.weight', _OURS + 'ffn/down/kernel', 'D F -> F D'),
        Weight(_LAYER + 'output.dense.bias', _OURS + 'ffn/down/bias', 'D'),
        *norm_rows(_LAYER + 'layernorm_before', _OURS + 'attention_residual/in_norm'),
        *norm_rows(_LAYER + 'layernorm_after', _OURS + 'ffn_residual/in_norm'),
        *norm_rows('vit.layernorm', 'encoder/final_norm'),
        Weight('vit.pooler.dense.weight', 'head_layer/dense/kernel', 'E D -> D E'),
        Weight('vit.pooler.dense.bias', 'head_layer/dense/bias', 'D'),
        Weight('classifier.weight', 'head/output/kernel', 'C D -> D C'),
        Weight('classifier.bias', 'head/output/bias', 'C'),
    ),
    fixed={'pooler_act': 'tanh'},
    ignored=('encoder_stride',),
    known=('image_size', 'patch_size', 'num_channels', 'pooler_output_size'),
    read=_read,
    write=_write,
    generates=False,
)  # fmt: skip
