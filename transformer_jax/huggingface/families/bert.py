"""BERT: a post-norm encoder with token types, and its heads: masked LM, pooler, classification."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface.derived import counting, zeros
from transformer_jax.huggingface.family import ACTIVATIONS, Derived, Family, Field, Fields, Weight, norm_rows

_TRANSFORM = 'cls.predictions.transform.'
_PROJECTIONS = ('query', 'key', 'value')


def encoder(prefix: str) -> tuple[Weight, ...]:
    """Returns the rows of embeddings and layers, which RoBERTa shares but for the prefix."""
    layer, ours = prefix + 'encoder.layer.{i}.', 'encoder/layers_{i}/'
    projections = []
    for name in _PROJECTIONS:
        own = f'{ours}attention/{name}/'
        projections.append(Weight(f'{layer}attention.self.{name}.weight', own + 'kernel', '(N H) D -> D N H'))
        projections.append(Weight(f'{layer}attention.self.{name}.bias', own + 'bias', '(N H) -> N H'))
    return (
        Weight(prefix + 'embeddings.word_embeddings.weight', 'embedding/embedding', 'V D'),
        Weight(prefix + 'embeddings.position_embeddings.weight', 'embedder/position/embedding', 'P D'),
        Weight(prefix + 'embeddings.token_type_embeddings.weight', 'embedder/token_type/embedding', 'U D'),
        *norm_rows(prefix + 'embeddings.LayerNorm', 'embedder/norm'),
        *projections,
        Weight(layer + 'attention.output.dense.weight', ours + 'attention/out/kernel', 'D (N H) -> N H D'),
        Weight(layer + 'attention.output.dense.bias', ours + 'attention/out/bias', 'D'),
        *norm_rows(layer + 'attention.output.LayerNorm', ours + 'attention_residual/out_norm'),
        Weight(layer + 'intermediate.dense.weight', ours + 'ffn/up/kernel', 'F D -> D F'),
        Weight(layer + 'intermediate.dense.bias', ours + 'ffn/up/bias', 'F'),
        Weight(layer + 'output.dense.weight', ours + 'ffn/down/kernel', 'D F -> F D'),
        Weight(layer + 'output.dense.bias', ours + 'ffn/down/bias', 'D'),
        *norm_rows(layer + 'output.LayerNorm', ours + 'ffn_residual/out_norm'),
    )


FIELDS = (
    Field('vocab_size', 'vocab_size'),
    Field('hidden_size', 'd_model'),
    Field('intermediate_size', 'd_ff'),
    Field('num_hidden_layers', 'num_layers'),
    Field('num_attention_heads', 'num_heads'),
    Field('hidden_act', 'ffn', 'gelu', ACTIVATIONS),
    Field('hidden_dropout_prob', 'dropout', 0.1),
    Field('attention_probs_dropout_prob', 'attention_dropout', 0.1),
    Field('type_vocab_size', 'token_types', 2),
    Field('layer_norm_eps', 'norm_epsilon', 1e-12),
)

CHOICES = dict(
    kind='encoder', position='learned', norm='layer', norm_position='post', embedding_norm=True, embedding_scale='none',
    qkv_bias=True, out_bias=True, ffn_bias=True, head_bias=True, tie_embeddings='output',
)  # fmt: skip

MASKED_LM = {'head': 'lm', 'pooling': 'none', 'head_norm': True, 'logits_bias': True}
CLASSIFICATION = {'head': 'classes', 'pooling': 'first', 'head_norm': False, 'logits_bias': False}
POOLER = {'head': 'none', 'pooling': 'first', 'head_norm': False, 'logits_bias': False}
BARE = {'head': 'none', 'pooling': 'none', 'head_norm': False, 'logits_bias': False}


def number_of_classes(fields: Fields) -> int:
    """Returns the number of labels, which is 2 where nothing says otherwise."""
    return fields.get('num_labels') or len(fields.get('id2label') or ()) or 2


def write_classes(config: ModelConfig) -> Fields:
    """Returns names for the labels, which is how newer versions store their number."""
    if config.num_classes is None:
        return {}
    names = {str(i): f'LABEL_{i}' for i in range(config.num_classes)}
    return {'id2label': names, 'label2id': {name: int(i) for i, name in names.items()}}


def check_dropout(fields: Fields):
    """A classifier here drops as much as the layers do."""
    stated = fields.get('classifier_dropout')
    if stated is not None and stated != fields.get('hidden_dropout_prob', 0.1):
        raise UserError(f'classifier_dropout = {stated} is not supported; only that of the layers is')


def read_head(fields: Fields, masked_lm_activation: str) -> Fields:
    """Returns what an architecture's head adds: the activation before it, and the number of classes."""
    architecture = (fields.get('architectures') or ['ForMaskedLM'])[0]
    if architecture.endswith('ForMaskedLM'):
        return {'head_activation': masked_lm_activation}
    if architecture.endswith('ForSequenceClassification'):
        check_dropout(fields)
        return {'head_activation': 'tanh', 'num_classes': number_of_classes(fields)}
    return {'head_activation': 'tanh'}


def _read(fields: Fields, names: frozenset[str]) -> Fields:
    choices = read_head(fields, ACTIVATIONS[fields.get('hidden_act', 'gelu')])
    if fields.get('architectures') == ['BertModel'] and 'bert.pooler.dense.weight' not in names:
        choices = {'pooling': 'none', 'head_activation': 'none'}
    return choices | {'max_positions': fields.get('max_position_embeddings', 512)}


def _write(config: ModelConfig) -> Fields:
    return {'max_position_embeddings': config.max_positions} | write_classes(config)


BERT = Family(
    model_type='bert',
    architectures={'BertForMaskedLM': MASKED_LM, 'BertForSequenceClassification': CLASSIFICATION, 'BertModel': POOLER},
    base_prefix='bert.',
    choices=CHOICES,
    fields=FIELDS,
    weights=(
        *encoder('bert.'),
        Weight(_TRANSFORM + 'dense.weight', 'head_layer/dense/kernel', 'E D -> D E', given='head_layer/norm'),
        Weight(_TRANSFORM + 'dense.bias', 'head_layer/dense/bias', 'D', given='head_layer/norm'),
        *norm_rows(_TRANSFORM + 'LayerNorm', 'head_layer/norm'),
        Weight('cls.predictions.bias', 'head/bias', 'V'),
        Weight('bert.pooler.dense.weight', 'head_layer/dense/kernel', 'E D -> D E', unless='head_layer/norm'),
        Weight('bert.pooler.dense.bias', 'head_layer/dense/bias', 'D', unless='head_layer/norm'),
        Weight('classifier.weight', 'head/output/kernel', 'C D -> D C'),
        Weight('classifier.bias', 'head/output/bias', 'C'),
    ),
    derived=(
        Derived(r'cls\.predictions\.decoder\.weight', 'tied to the embedding',
                tied_to='bert.embeddings.word_embeddings.weight'),
        Derived(r'cls\.predictions\.decoder\.bias', 'tied to the bias', tied_to='cls.predictions.bias'),
        Derived(r'bert\.embeddings\.position_ids', 'counts from 0', counting),
        Derived(r'bert\.embeddings\.token_type_ids', 'zeros', zeros),
        # A masked LM's file often has the other heads of pre-training too.
        Derived(r'bert\.pooler\.dense\.(weight|bias)', 'a head which this architecture lacks'),
        Derived(r'cls\.seq_relationship\.(weight|bias)', 'a head which this architecture lacks'),
    ),
    renames=((r'LayerNorm\.gamma$', 'LayerNorm.weight'), (r'LayerNorm\.beta$', 'LayerNorm.bias')),
    fixed={'tie_word_embeddings': True},
    known=('max_position_embeddings',),
    ignored=('pooler_fc_size', 'pooler_num_attention_heads', 'pooler_num_fc_layers', 'pooler_size_per_head',
             'pooler_type'),
    read=_read,
    write=_write,
)  # fmt: skip
