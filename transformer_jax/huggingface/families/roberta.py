"""RoBERTa: BERT whose positions begin after the padding id, with other names for its heads."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface.derived import counting, zeros
from transformer_jax.huggingface.families import bert
from transformer_jax.huggingface.family import Derived, Family, Fields, Weight


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    choices = bert.read_head(fields, 'gelu')
    if fields.get('architectures') == ['RobertaModel'] and 'roberta.pooler.dense.weight' not in names:
        choices = {'pooling': 'none', 'head_activation': 'none'}
    # Real tokens are counted from pad_token_id + 1, so the first rows of the table are never real positions.
    padding = fields.get('pad_token_id', 1)
    if padding is None:
        raise UserError('pad_token_id = None is not supported; positions begin after it')
    offset = padding + 1
    rows = fields.get('max_position_embeddings', 512)
    return choices | {'position_offset': offset, 'max_positions': rows - offset}


def _write(config: ModelConfig) -> Fields:
    sizes = {'max_position_embeddings': config.max_positions + config.position_offset}
    return sizes | {'pad_token_id': config.position_offset - 1} | bert.write_classes(config)


ROBERTA = Family(
    model_type='roberta',
    architectures={
        'RobertaForMaskedLM': bert.MASKED_LM,
        'RobertaForSequenceClassification': bert.CLASSIFICATION,
        'RobertaModel': bert.POOLER,
    },
    base_prefix='roberta.',
    choices=bert.CHOICES,
    fields=bert.FIELDS,
    weights=(
        *bert.encoder('roberta.'),
        Weight('lm_head.dense.weight', 'head_layer/dense/kernel', 'E D -> D E', given='head_layer/norm'),
        Weight('lm_head.dense.bias', 'head_layer/dense/bias', 'D', given='head_layer/norm'),
        Weight('lm_head.layer_norm.weight', 'head_layer/norm/scale', 'D'),
        Weight('lm_head.layer_norm.bias', 'head_layer/norm/bias', 'D'),
        Weight('lm_head.bias', 'head/bias', 'V'),
        Weight('roberta.pooler.dense.weight', 'head_layer/dense/kernel', 'E D -> D E', unless='head/'),
        Weight('roberta.pooler.dense.bias', 'head_layer/dense/bias', 'D', unless='head/'),
        Weight('classifier.dense.weight', 'head_layer/dense/kernel', 'E D -> D E', given='head/output/bias'),
        Weight('classifier.dense.bias', 'head_layer/dense/bias', 'D', given='head/output/bias'),
        Weight('classifier.out_proj.weight', 'head/output/kernel', 'C D -> D C'),
        Weight('classifier.out_proj.bias', 'head/output/bias', 'C'),
    ),
    derived=(
        Derived(
            r'lm_head\.decoder\.weight', 'tied to the embedding', tied_to='roberta.embeddings.word_embeddings.weight'
        ),
        Derived(r'lm_head\.decoder\.bias', 'tied to the bias', tied_to='lm_head.bias'),
        Derived(r'roberta\.embeddings\.position_ids', 'counts from 0', counting),
        Derived(r'roberta\.embeddings\.token_type_ids', 'zeros', zeros),
        Derived(r'roberta\.pooler\.dense\.(weight|bias)', 'a head which this architecture lacks'),
    ),
    fixed={'tie_word_embeddings': True},
    known=('max_position_embeddings', 'pad_token_id'),
    read=_read,
    write=_write,
)
