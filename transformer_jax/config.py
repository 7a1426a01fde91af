"""ModelConfig: every architectural choice of the Transformer family, by name, validated when it is built."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError, choose, suggest
from transformer_jax.subconfigs import LatentConfig, MixtureConfig, PatchConfig, RopeScaling

KINDS = ('encoder_decoder', 'encoder', 'decoder', 'vision')
POSITIONS = ('none', 'sinusoidal', 'sinusoidal_halves', 'learned', 'rope', 'alibi', 'relative')
NORMS = ('layer', 'rms', 'rms_plus_one')
NORM_POSITIONS = ('post', 'pre', 'sandwich', 'res_post', 'deepnorm', 'parallel', 'parallel_two_norms')
FFNS = ('relu', 'gelu', 'gelu_tanh', 'silu', 'gated_relu', 'gated_gelu', 'gated_gelu_tanh', 'gated_silu')
TIES = ('none', 'inputs', 'output', 'all')
HEADS = ('lm', 'classes', 'none')
POOLINGS = ('none', 'first', 'mean')
HEAD_ACTIVATIONS = ('none', 'tanh', 'relu', 'gelu', 'gelu_tanh', 'silu')
LAYER_STACKS = ('scan', 'unrolled')
REMATS = ('none', 'full', 'dots', 'offload')
DTYPES = ('float32', 'bfloat16')
LAYER_KINDS = ('global', 'local')
BACKENDS = ('auto', 'splash', 'cudnn', 'blockwise', 'reference')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One architecture of the Transformer family (defaults: `transformer_base` of Vaswani et al. 2017).

    Attributes:
      kind: 'encoder_decoder', 'encoder', 'decoder' or 'vision', an encoder of images.
      patches: how a vision encoder cuts images up.
      vocab_size: V, true vocabulary size; vocab_multiple: the tables of words have V rounded up to a multiple of it, so
        that they divide over devices; the rows past V are no words, and their logits are -inf.
      d_model, d_ff: D and F, widths of the model and of the feed-forward layer.
      num_layers: L, layers of the (first) stack; num_decoder_layers: of the decoder of an encoder-decoder (None: L).
      num_heads, num_kv_heads: N and K (None: N; 1: multi-query; between: grouped-query).
      d_k, d_v: width of a query/key head and of a value head (None: D / N, and d_k).
      qkv_bias, out_bias: biases of attention's input and output projections.
      attention_scale: factor of QK^T (None: 1 / sqrt(d_k)).
      qk_norm: 'none', 'head' (one norm shared by the heads) or 'full' (over all heads' features).
      latent: multi-head latent attention in place of keys and values per head.
      attention_softcap, logits_softcap: c in c tanh(x / c), None for none.
      window: W, keys a query of a 'local' layer sees, itself included.
      layer_pattern: repeating kinds of layers, of 'global' and 'local'.
      position: how order enters: 'none', 'sinusoidal' (interleaved, the paper's), 'sinusoidal_halves' (Marian),
        'learned', 'rope', 'alibi' or 'relative' (T5's buckets).
      max_positions: longest sequence (None: no limit; 'learned' needs it); position_offset: first row which is used.
      trained_positions: length of the sequences it was trained on, where positions are computed and longer ones are
        allowed; exchanged with checkpoints, and changes nothing.
      rope_theta, rope_local_theta: base of the frequencies, and that of 'local' layers (None: the same).
      rope_fraction: part of d_k which is rotated; rope_layout: 'half' pairs (i, i + half), 'interleaved' (2i, 2i + 1).
      rope_scaling: stretching beyond the trained length.
      relative_buckets, relative_max_distance: T5's table.
      norm: 'layer', 'rms' or 'rms_plus_one' (scale stored as its difference to 1); norm_epsilon; norm_bias.
      norm_position: where norms stand in the residual formula, see `layers.residual`.
      final_norm: a norm after the last layer (None: where the placement needs one); embedding_norm: before the first.
      first_norm: False leaves out the norm which the first sublayer's input has in 'pre' (ModernBERT, whose embedding
        norm has just normalised it).
      ffn: the activation, 'gated_' where it multiplies a second projection; ffn_bias.
      mixture: experts in place of the feed-forward layer.
      embedding_scale: 'sqrt_d_model' or 'none'.
      tie_embeddings: 'none', 'inputs' (source = target), 'output' (target = output) or 'all' (the paper's three-way).
      token_types: number of segment embeddings, 0 for none.
      logits_bias: a bias per word; logits_scale: factor of the last hidden state before the output matrix.
      head: 'lm' (logits over the vocabulary), 'classes' (over num_classes, of a pooled sequence) or 'none'.
      pooling: what stands for a sequence, its 'first' real token or the 'mean' of its real tokens; 'none': no pooling.
      head_activation, head_bias, head_norm: a layer norm(act(x W + b)) before the logits, or on what is pooled
        ('none': no such layer), see `layers.head`.
      dropout: on each sublayer's output and on the embedded input; attention_dropout on the attention weights,
        ffn_dropout on the activated hidden layer.
      initializer: 'xavier' (uniform, Glorot) or 'normal' with initializer_stddev.
      dtype: of products' operands, 'float32' or 'bfloat16' (sums, softmax, norms and logits are fp32); param_dtype.
      layer_stack: 'scan' (parameters on a leading L axis) or 'unrolled'; remat: what the backward pass recomputes,
        'none', 'full', 'dots' (all but products) or 'offload' (products kept in host memory).
      attention_backend: 'auto', 'reference', 'blockwise' (O(T) memory), 'splash' (TPU) or 'cudnn' (NVIDIA GPU).
      cache_dtype: of cached keys and values, 'compute' (that of the products) or 'int8' (see `quantization`).
      decode: defaults of `generate`.
    """

    kind: str = 'encoder_decoder'
    patches: PatchConfig | None = None
    vocab_size: int = 37000
    vocab_multiple: int = 1
    d_model: int = 512
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    num_kv_heads: int | None = None
    d_k: int | None = None
    d_v: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    attention_scale: float | None = None
    qk_norm: str = 'none'
    latent: LatentConfig | None = None
    attention_softcap: float | None = None
    window: int | None = None
    layer_pattern: tuple[str, ...] = ('global',)
    position: str = 'sinusoidal'
    max_positions: int | None = None
    position_offset: int = 0
    trained_positions: int | None = None
    rope_theta: float = 10000.0
    rope_local_theta: float | None = None
    rope_fraction: float = 1.0
    rope_layout: str = 'half'
    rope_scaling: RopeScaling | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128
    norm: str = 'layer'
    norm_epsilon: float = 1e-6
    norm_bias: bool = True
    norm_position: str = 'post'
    final_norm: bool | None = None
    first_norm: bool = True
    embedding_norm: bool = False
    ffn: str = 'relu'
    ffn_bias: bool = True
    mixture: MixtureConfig | None = None
    embedding_scale: str = 'sqrt_d_model'
    tie_embeddings: str = 'all'
    token_types: int = 0
    logits_bias: bool = False
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    head: str = 'lm'
    num_classes: int | None = None
    pooling: str = 'none'
    head_activation: str = 'none'
    head_bias: bool = True
    head_norm: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0
    initializer: str = 'xavier'
    initializer_stddev: float = 0.02
    dtype: str = 'float32'
    param_dtype: str = 'float32'
    layer_stack: str = 'scan'
    remat: str = 'none'
    attention_backend: str = 'auto'
    cache_dtype: str = 'compute'
    decode: DecodeConfig | None = None

    def __post_init__(self):
        object.__setattr__(self, 'layer_pattern', tuple(self.layer_pattern))
        for name, options in _CHOICES.items():
            choose(f'model.{name}', getattr(self, name), options)
        for kind in self.layer_pattern:
            choose('model.layer_pattern', kind, LAYER_KINDS)
        _check_sizes(self)
        _check_combinations(self)

    @property
    def kv_heads(self) -> int:
        """K, the number of key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the tables of words: V rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def key_dim(self) -> int:
        """H, the width of a query or key head."""
        return self.d_model // self.num_heads if self.d_k is None else self.d_k

    @property
    def value_dim(self) -> int:
        """The width of a value head."""
        return self.key_dim if self.d_v is None else self.d_v

    @property
    def scale(self) -> float:
        """The factor of QK^T."""
        return self.key_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions: as many as tokens can stand at."""
        return self.max_positions + self.position_offset if self.patches is None else self.patches.tokens

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows the last layer: where nothing else normalises the residual stream, unless stated."""
        if self.final_norm is None:
            return self.norm_position not in ('post', 'deepnorm')
        return self.final_norm

    @property
    def prefix_layers(self) -> int:
        """First layers which are never scanned: whole periods, as far as their parameters differ from the others'."""
        differing = max(self.dense_layers, 0 if self.first_norm else 1)
        return math.ceil(differing / len(self.layer_pattern)) * len(self.layer_pattern)

    @property
    def dense_layers(self) -> int:
        """First layers whose feed-forward layer is dense though that of the others is a mixture."""
        return 0 if self.mixture is None else self.mixture.dense_layers

    def depth(self, stack: str) -> int:
        """L, the number of layers of the 'encoder' or the 'decoder'."""
        if stack == 'decoder' and self.kind == 'encoder_decoder' and self.num_decoder_layers is not None:
            return self.num_decoder_layers
        return self.num_layers

    def replace(self, **changes: Any) -> ModelConfig:
        """Returns a copy with some choices changed.

        Raises:
          UserError: for an unknown name, with the nearest valid one.
        """
        _check_names(changes, type(self), 'model')
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data which JSON can hold; `from_dict` reads it back."""
        return dataclasses.asdict(self) | {'layer_pattern': list(self.layer_pattern)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Reads what `to_dict` wrote.

        Raises:
          UserError: for an unknown name, with the nearest valid one.
        """
        fields = dict(fields)
        _check_names(fields, cls, 'model')
        for name, group in _GROUPS.items():
            if isinstance(fields.get(name), Mapping):
                _check_names(fields[name], group, f'model.{name}')
                fields[name] = group(**fields[name])
        if isinstance(fields.get('decode'), Mapping):
            fields['decode'] = DecodeConfig.from_dict(fields['decode'])
        return cls(**fields)


_GROUPS = {'rope_scaling': RopeScaling, 'mixture': MixtureConfig, 'latent': LatentConfig, 'patches': PatchConfig}

_CHOICES = {
    'kind': KINDS,
    'position': POSITIONS,
    'norm': NORMS,
    'norm_position': NORM_POSITIONS,
    'ffn': FFNS,
    'tie_embeddings': TIES,
    'head': HEADS,
    'pooling': POOLINGS,
    'head_activation': HEAD_ACTIVATIONS,
    'layer_stack': LAYER_STACKS,
    'remat': REMATS,
    'dtype': DTYPES,
    'param_dtype': DTYPES,
    'attention_backend': BACKENDS,
    'cache_dtype': ('compute', 'int8'),
    'qk_norm': ('none', 'head', 'full'),
    'rope_layout': ('half', 'interleaved'),
    'embedding_scale': ('sqrt_d_model', 'none'),
    'initializer': ('xavier', 'normal'),
}


def _check_names(fields: Mapping[str, Any], cls: type, where: str):
    names = [field.name for field in dataclasses.fields(cls)]
    for name in fields:
        if name not in names:
            raise UserError(f'{where}.{name} is unknown{suggest(name, names)}')


def _check_sizes(config: ModelConfig):
    for name in ('vocab_size', 'vocab_multiple', 'd_model', 'd_ff', 'num_layers', 'num_decoder_layers', 'num_heads',
                 'num_kv_heads', 'd_k', 'd_v', 'window', 'max_positions', 'trained_positions',
                 'num_classes'):  # fmt: skip
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f'model.{name} = {value!r}; it must be a whole number of at least 1')
    for name in ('dropout', 'attention_dropout', 'ffn_dropout'):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f'model.{name} = {getattr(config, name)}; it must be at least 0 and below 1')
    if config.d_k is None and config.d_model % config.num_heads:
        raise UserError(
            f'model.num_heads = {config.num_heads} does not divide model.d_model = {config.d_model}; '
            f'the nearest that does is {_nearest_divisor(config.d_model, config.num_heads)}, or set model.d_k'
        )
    if config.num_heads % config.kv_heads:
        raise UserError(
            f'model.num_kv_heads = {config.kv_heads} does not divide model.num_heads = {config.num_heads}; '
            f'the nearest that does is {_nearest_divisor(config.num_heads, config.kv_heads)}'
        )


def _check_combinations(config: ModelConfig):
    if config.position == 'learned' and config.max_positions is None and config.kind != 'vision':
        raise UserError("model.position = 'learned' needs model.max_positions, the number of rows of its table")
    if 'local' in config.layer_pattern and config.window is None:
        raise UserError("model.layer_pattern has 'local' layers, which need model.window")
    if config.window is not None and 'local' not in config.layer_pattern:
        raise UserError("model.window is set but model.layer_pattern has no 'local' layer, so it would do nothing")
    if config.position == 'rope' and rotary_width(config) % 2:
        raise UserError(f'rope rotates pairs, but {rotary_width(config)} features would be rotated; choose an even d_k')
    if config.position.startswith('sinusoidal') and config.d_model % 2:
        raise UserError(f'sinusoidal positions need an even model.d_model, not {config.d_model}')
    if config.rope_scaling is not None and config.position != 'rope':
        raise UserError(f"model.rope_scaling needs model.position = 'rope', not '{config.position}'")
    if config.norm_position.startswith('parallel') and config.kind == 'encoder_decoder':
        raise UserError(f"model.norm_position = '{config.norm_position}' has no place for cross-attention")
    if config.num_decoder_layers is not None and config.kind != 'encoder_decoder':
        raise UserError(f"model.num_decoder_layers needs kind 'encoder_decoder', not '{config.kind}'; use num_layers")
    if not config.first_norm and config.norm_position != 'pre':
        raise UserError(f"model.first_norm = False needs model.norm_position = 'pre', not '{config.norm_position}'")
    _check_latent(config)
    _check_patches(config)
    if config.mixture is not None and config.ffn_bias:
        raise UserError('model.mixture has experts without biases; set model.ffn_bias = False')
    _check_head(config)


def _check_latent(config: ModelConfig):
    if config.latent is None:
        return
    if config.d_k is None or config.d_k <= config.latent.rotary_dim:
        raise UserError(f'model.latent needs model.d_k above latent.rotary_dim = {config.latent.rotary_dim}, the part '
                        f'of it which is rotated; it is {config.d_k}')  # fmt: skip
    dynamic = config.rope_scaling is not None and config.rope_scaling.kind == 'dynamic'
    for name, wrong in (
        ("model.kind = 'encoder_decoder'", config.kind == 'encoder_decoder'),
        (f"model.position = '{config.position}'; choose 'rope'", config.position != 'rope'),
        ('model.rope_fraction', config.rope_fraction != 1),
        ("model.rope_scaling.kind = 'dynamic'", dynamic),
        ('model.num_kv_heads', config.kv_heads != config.num_heads),
        ('model.qk_norm', config.qk_norm != 'none'),
        ("'local' layers", 'local' in config.layer_pattern),
        ("model.norm_position = 'deepnorm'", config.norm_position == 'deepnorm'),
        ("model.cache_dtype = 'int8'", config.cache_dtype == 'int8'),
    ):
        if wrong:
            raise UserError(f'model.latent does not go with {name}')


def _check_patches(config: ModelConfig):
    if (config.kind == 'vision') != (config.patches is not None):
        raise UserError("model.kind = 'vision' and model.patches need each other")
    if config.kind != 'vision':
        return
    if config.max_positions is not None or config.position_offset:
        raise UserError(f'model.max_positions and position_offset are for tokens; images have {config.patches.tokens}')
    if config.token_types or config.tie_embeddings != 'none' or config.embedding_scale != 'none':
        raise UserError("images have no words: model.token_types = 0, tie_embeddings and embedding_scale = 'none'")
    if config.pooling == 'first' and not config.patches.class_token:
        raise UserError("model.pooling = 'first' needs patches.class_token, or is 'mean'")
    if config.head == 'lm':
        raise UserError("model.head = 'lm' needs words; a vision encoder has 'classes' or 'none'")


def _check_head(config: ModelConfig):
    if config.pooling != 'none' and (config.kind not in ('encoder', 'vision') or config.head == 'lm'):
        raise UserError(f"model.pooling = '{config.pooling}' needs model.kind = 'encoder' or 'vision' and no 'lm' head")
    if config.head == 'classes' and (config.pooling == 'none' or config.num_classes is None):
        raise UserError("model.head = 'classes' needs model.num_classes and model.pooling, 'first' or 'mean'")
    if config.head != 'classes' and config.num_classes is not None:
        raise UserError(f"model.num_classes needs model.head = 'classes', not '{config.head}'")
    if config.head_norm and config.head_activation == 'none':
        raise UserError('model.head_norm needs model.head_activation')
    if config.head_activation != 'none' and (
        config.kind == 'encoder_decoder' or (config.head == 'none' and config.pooling == 'none')
    ):
        raise UserError('model.head_activation needs one stack, with a head or with model.pooling')


def rotary_width(config: ModelConfig) -> int:
    """Returns how many features of a query or key head are rotated."""
    return int(config.key_dim * config.rope_fraction) if config.latent is None else config.latent.rotary_dim


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min({*divisors, *(number // d for d in divisors)}, key=lambda d: (abs(d - wanted), d))
