"""What a family of checkpoints is: a table of weights, a table of config fields, and what may be there or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError, suggest

Fields = dict[str, Any]
REQUIRED = object()

# Fields of a config.json which do not change what the network computes.
IGNORED = frozenset(
    """_name_or_path architectures model_type transformers_version torch_dtype dtype use_cache initializer_range
    initializer_factor init_std output_attentions output_hidden_states return_dict id2label label2id num_labels
    problem_type finetuning_task task_specific_params tokenizer_class tie_encoder_decoder torchscript use_bfloat16
    pruned_heads is_encoder_decoder chunk_size_feed_forward gradient_checkpointing attn_implementation
    _attn_implementation _attn_implementation_autoset bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id
    unk_token_id mask_token_id decoder_start_token_id classifier_dropout classif_dropout pretraining_tp
    initializer_cutoff_factor _num_labels directionality output_past model_max_length license
    cross_attention_hidden_size prefix""".split()
)

# Fields of generation which old files keep in config.json; `generation` reads them.
GENERATION = frozenset(
    """max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids
    encoder_no_repeat_ngram_size num_return_sequences forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens remove_invalid_values exponential_decay_length_penalty return_dict_in_generate output_scores
    force_bos_token_to_be_generated""".split()
)

# Fields for which only the stated value is supported, in any family.
FIXED: Fields = {
    'is_decoder': False, 'add_cross_attention': False, 'auto_map': None, 'quantization_config': None,
    'per_layer_config': None, 'encoder_layerdrop': 0.0, 'decoder_layerdrop': 0.0, 'position_embedding_type': 'absolute',
}  # fmt: skip

ACTIVATIONS = {
    'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu_fast': 'gelu_tanh', 'gelu': 'gelu', 'relu': 'relu',
    'silu': 'silu', 'swish': 'silu',
}  # fmt: skip
GATED = {theirs: f'gated_{ours}' for theirs, ours in ACTIVATIONS.items()}


class Weight(NamedTuple):
    """One row of a weight table; it applies where our model has the parameters it names.

    Attributes:
      theirs: name of their tensor, '{i}' the number of the layer, '{e}' that of the expert.
      ours: path of our parameter, or several, separated by spaces, which one tensor of theirs holds.
      axes: how one becomes the other, see `Rearrange`.
      given, unless: beginnings of paths of ours; the row applies only where some, or where no parameter has it.
    """

    theirs: str
    ours: str
    axes: str = 'D'
    given: str = ''
    unless: str | None = None


def norm_rows(theirs: str, ours: str) -> tuple[Weight, Weight]:
    """Returns the rows of a norm's scale and bias."""
    return Weight(theirs + '.weight', ours + '/scale', 'D'), Weight(theirs + '.bias', ours + '/bias', 'D')


def fused_rows(theirs: str, ours: str, names: tuple[str, ...], kernel: str, bias: str) -> tuple[Weight, Weight]:
    """Returns the rows of a matrix, and its bias, which hold those of several linear layers `ours` + name."""
    kernels, biases = (' '.join(f'{ours}{name}/{leaf}' for name in names) for leaf in ('kernel', 'bias'))
    return Weight(theirs + '.weight', kernels, kernel), Weight(theirs + '.bias', biases, bias)


QUERY_KEY_VALUE = ('query', 'key', 'value')


class Derived(NamedTuple):
    """A tensor which may be there or not, because nothing new is in it.

    Attributes:
      pattern: regular expression of its name.
      reason: why, for the log.
      value: what it should hold, given our config and its shape; None: whatever it holds is left out.
      tied_to: name of their tensor which it should equal.
    """

    pattern: str
    reason: str
    value: Callable[[ModelConfig, tuple[int, ...]], np.ndarray] | None = None
    tied_to: str | None = None


class Field(NamedTuple):
    """One row of a config table.

    Attributes:
      theirs, ours: the names; the values are the same but for `values`.
      default: what a config.json without the field means; REQUIRED where it must be there.
      values: their value -> ours, where they differ; the first of several with one value of ours is written.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Attributes:
      model_type: its name in config.json.
      architectures: class name in config.json -> the choices of ours which it means.
      base_prefix: prefix of tensor names of a model with a head, which the bare model lacks.
      choices: choices of ours which all its models share.
      fields: rows of the config table.
      weights: rows of the weight table.
      derived: tensors which may be there or not.
      fixed: fields of config.json of which only this value is supported; they are written too.
      ignored: fields of config.json which do not change what is computed.
      read: further choices from config.json and the names of the tensors; write: the reverse.
      write_tensors: derived tensors which transformers misses where they are not there.
      known: fields of config.json which `read` reads.
      renames: (regular expression, replacement) of names which older files use.
      optional: tensors which a file may lack, and then hold zeros.
      generates: whether it answers (else no generation config is read).
    """

    model_type: str
    architectures: Mapping[str, Fields]
    base_prefix: str
    choices: Fields
    fields: tuple[Field, ...]
    weights: tuple[Weight, ...]
    derived: tuple[Derived, ...] = ()
    fixed: Fields = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    read: Callable[[Fields, frozenset[str]], Fields] = lambda fields, names: {}
    write: Callable[[ModelConfig], Fields] = lambda config: {}
    write_tensors: Callable[[ModelConfig], dict[str, np.ndarray]] = lambda config: {}
    known: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    optional: tuple[str, ...] = ()
    generates: bool = True


def with_defaults(rows: tuple[Field, ...], **values: Any) -> tuple[Field, ...]:
    """Returns the rows, some of which mean something else where config.json lacks the field."""
    return tuple(row._replace(default=values.get(row.theirs, row.default)) for row in rows)


def read_config(family: Family, fields: Fields, names: frozenset[str], where: str) -> tuple[Fields, list[str]]:
    """Returns choices of a ModelConfig from config.json, and the names of fields which nobody knows.

    Raises:
      UserError: for a field which is missing, and for a value which is not supported, naming those which are.
    """
    architecture = _architecture(family, fields, where)
    choices, said = dict(family.choices) | family.architectures[architecture], {}
    for name, supported in (FIXED | family.fixed).items():
        if name not in family.ignored and fields.get(name) not in (supported, None):
            raise UserError(f'{where}: {name} = {fields[name]!r} is not supported; only {supported!r} is')
    for row in family.fields:
        value = fields.get(row.theirs)
        if value is None:
            value = row.default
        if value is REQUIRED:
            raise UserError(f'{where} lacks {row.theirs}, which {family.model_type} models state')
        if row.values is not None:
            if not isinstance(value, Hashable) or value not in row.values:
                hint = suggest(value, row.values)
                raise UserError(f'{where}: {row.theirs} = {value!r} is not supported{hint}')
            value = row.values[value]
        if said.setdefault(row.ours, value) != value:
            raise UserError(f'{where}: {row.theirs} = {value!r}, but another field says {said[row.ours]!r}; '
                            f'{row.ours} is one number here')  # fmt: skip
        choices[row.ours] = value
    choices |= family.read(fields, names)
    known = IGNORED | GENERATION | FIXED.keys() | family.fixed.keys() | set(family.ignored) | set(family.known)
    known |= {row.theirs for row in family.fields}
    unknown = sorted(name for name in fields if name not in known and fields[name] not in (None, False))
    return choices, unknown


def _architecture(family: Family, fields: Fields, where: str) -> str:
    named = fields.get('architectures') or [next(iter(family.architectures))]
    if named[0] not in family.architectures:
        raise UserError(f"{where}: architecture '{named[0]}' is not supported{suggest(named[0], family.architectures)}")
    return named[0]


def write_config(family: Family, config: ModelConfig) -> Fields:
    """Returns the fields of config.json which say a ModelConfig.

    Raises:
      UserError: for a choice which the family cannot say.
    """
    if config.kind != family.choices['kind']:
        raise UserError(f"{family.model_type} cannot say kind = '{config.kind}'")
    fields: Fields = dict(family.fixed) | {'model_type': family.model_type}
    for name, choices in family.architectures.items():
        if all(getattr(config, ours) == value for ours, value in choices.items()):
            fields['architectures'] = [name]
            break
    else:
        known = '; '.join(
            f'{name} has ' + ', '.join(f'{ours} = {value!r}' for ours, value in choices.items())
            for name, choices in family.architectures.items()
        )
        raise UserError(f'{family.model_type} cannot say head = {config.head!r} with its other choices: {known}')
    for row in family.fields:
        value = getattr(config, row.ours)
        if row.values is not None:
            value = next((theirs for theirs, ours in row.values.items() if ours == value), REQUIRED)
        if value is REQUIRED or (row.theirs in fields and fields[row.theirs] != value):
            raise UserError(f'{family.model_type} cannot say {row.ours} = {getattr(config, row.ours)!r}')
        fields[row.theirs] = value
    fields |= family.write(config)
    _check_said(family, config, fields)
    return fields


# Choices which say how to run or train a model, not which function it is.
_FREE = frozenset(
    """dropout attention_dropout ffn_dropout initializer initializer_stddev dtype param_dtype layer_stack remat
    attention_backend cache_dtype decode max_positions trained_positions""".split()
)


def _check_said(family: Family, config: ModelConfig, fields: Fields):
    """Reads the fields back: whatever comes out different is a choice which the family cannot say."""
    choices, _ = read_config(family, fields, _telling_names(family, config), family.model_type)
    back = ModelConfig(**choices)
    for field in dataclasses.fields(ModelConfig):
        mine, theirs = getattr(config, field.name), getattr(back, field.name)
        if field.name not in _FREE and mine != theirs and not _same_by_default(field.name, config, back):
            raise UserError(f'{family.model_type} cannot say {field.name} = {mine!r} (it would mean {theirs!r})')


def _same_by_default(name: str, one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configs mean the same, though one states it and the other leaves it to the default."""
    derived = {'num_kv_heads': 'kv_heads', 'd_k': 'key_dim', 'd_v': 'value_dim', 'attention_scale': 'scale',
               'final_norm': 'has_final_norm'}  # fmt: skip
    if name in derived:
        return getattr(one, derived[name]) == getattr(other, derived[name])
    if name == 'num_decoder_layers':
        return one.depth('decoder') == other.depth('decoder')
    if name == 'mixture' and one.mixture is not None and other.mixture is not None:
        functions = [
            dataclasses.replace(c.mixture, d_ff=c.mixture.d_ff or c.d_ff, balance_loss=0.0, z_loss=0.0)
            for c in (one, other)
        ]
        return functions[0] == functions[1]
    if name == 'layer_pattern':
        patterns = [[c.layer_pattern[i % len(c.layer_pattern)] for i in range(c.num_layers)] for c in (one, other)]
        return patterns[0] == patterns[1]
    return False


def _telling_names(family: Family, config: ModelConfig) -> frozenset[str]:
    """Returns the names of tensors whose presence tells of a choice: an output matrix of its own, and a pooler."""
    paths = set()
    if config.head == 'lm' and config.tie_embeddings in ('none', 'inputs'):
        paths.add('head/output/kernel')
    if config.head_activation != 'none':
        paths.add('head_layer/dense/kernel')
    return frozenset(row.theirs for row in family.weights if row.ours in paths)
