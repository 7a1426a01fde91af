"""From a GGUF file of the LLaMA family, quantised or not, to a model and its parameters."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np

from transformer_jax.config import DTYPES, ModelConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError, choose
from transformer_jax.huggingface.families import FAMILIES
from transformer_jax.huggingface.family import Fields, read_config
from transformer_jax.huggingface.load import read_params
from transformer_jax.models import build

ARCHITECTURE = 'llama'

# Name in a GGUF file, {i} the number of the layer -> name in a Hugging Face checkpoint.
NAMES = {
    'token_embd.weight': 'model.embed_tokens.weight',
    'blk.{i}.attn_norm.weight': 'model.layers.{i}.input_layernorm.weight',
    'blk.{i}.attn_q.weight': 'model.layers.{i}.self_attn.q_proj.weight',
    'blk.{i}.attn_k.weight': 'model.layers.{i}.self_attn.k_proj.weight',
    'blk.{i}.attn_v.weight': 'model.layers.{i}.self_attn.v_proj.weight',
    'blk.{i}.attn_output.weight': 'model.layers.{i}.self_attn.o_proj.weight',
    'blk.{i}.ffn_norm.weight': 'model.layers.{i}.post_attention_layernorm.weight',
    'blk.{i}.ffn_gate.weight': 'model.layers.{i}.mlp.gate_proj.weight',
    'blk.{i}.ffn_up.weight': 'model.layers.{i}.mlp.up_proj.weight',
    'blk.{i}.ffn_down.weight': 'model.layers.{i}.mlp.down_proj.weight',
    'output_norm.weight': 'model.norm.weight',
    'output.weight': 'lm_head.weight',
}

# Field of config.json -> key of the file, {a} its architecture.
FIELDS = {
    'hidden_size': '{a}.embedding_length',
    'intermediate_size': '{a}.feed_forward_length',
    'num_hidden_layers': '{a}.block_count',
    'num_attention_heads': '{a}.attention.head_count',
    'rms_norm_eps': '{a}.attention.layer_norm_rms_epsilon',
}
OPTIONAL_FIELDS = {
    'num_key_value_heads': '{a}.attention.head_count_kv',
    'head_dim': '{a}.attention.key_length',
    'max_position_embeddings': '{a}.context_length',
    'rope_theta': '{a}.rope.freq_base',
}


def load_gguf(
    path: str | os.PathLike, dtype: str = 'float32', *, layer_stack: str = 'scan'
) -> tuple[nn.Module, dict[str, Any]]:
    """Reads a GGUF file of architecture 'llama'; quantised tensors are dequantised, block by block, to `dtype`.

    The format rotates neighbouring features of a head, so the rows of its query and key matrices are permuted; they are
    put back into the order of Hugging Face, whose weight table then reads them. The tokenizer is not read.

    Args:
      path: of the file.
      dtype: of parameters and products, 'float32' or 'bfloat16'.
      layer_stack: 'scan' or 'unrolled', as in ModelConfig.

    Returns:
      (model, params), numpy arrays; the model's config has the file's end and padding ids as `decode`.

    Raises:
      UserError: in one line, where the package `gguf` is not installed, the file is missing, cut short or of another
        architecture, and for tensors which are missing, unexpected or of a wrong shape.
    """
    choose('dtype', dtype, DTYPES)
    tensors = GgufTensors(Path(path))
    family = FAMILIES[ARCHITECTURE]
    fields = tensors.config_fields()
    choices, _ = read_config(family, fields, frozenset(tensors.shapes), str(path))
    choices |= dict(dtype=dtype, param_dtype=dtype, layer_stack=layer_stack, initializer='normal')
    config = ModelConfig(**choices, decode=tensors.decode())
    return build(config), read_params(family, config, tensors, Path(path))


class GgufTensors:
    """The tensors of a file by their Hugging Face names, dequantised when they are read.

    Attributes:
      shapes: shape of each tensor; dtypes: its type, as GGUF names it ('F32', 'Q4_1' ...).

    Raises:
      UserError: as `load_gguf`.
    """

    def __init__(self, path: Path):
        self._path = path
        reader, self._dequantize = _open(path)
        self._keys = {name: field.contents() for name, field in reader.fields.items() if not name.endswith('.tokens')}
        found = self._keys.get('general.architecture')
        if found != ARCHITECTURE:
            raise UserError(f"{path} holds architecture '{found}'; only '{ARCHITECTURE}' is read")
        scaled = [key for key in self._keys if key.startswith(f'{ARCHITECTURE}.rope.scaling')]
        if scaled:
            raise UserError(f'{path} has {scaled[0]}; scaled rotary positions are not read from GGUF')
        self._held = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
        self.shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._held.items()}
        self.dtypes = {name: tensor.tensor_type.name for name, tensor in self._held.items()}
        fields = self.config_fields()
        width = fields.get('head_dim', fields['hidden_size'] // fields['num_attention_heads'])
        if (rotated := self._keys.get(f'{ARCHITECTURE}.rope.dimension_count', width)) != width:
            raise UserError(f'{path} rotates {rotated} of the {width} features of a head; only all of them are read')
        heads = fields['num_attention_heads']
        self._rotated = {'q_proj': heads, 'k_proj': fields.get('num_key_value_heads', heads)}

    def config_fields(self) -> Fields:
        """Returns what a config.json of the same model says."""
        fields = {name: self._key(key) for name, key in FIELDS.items()}
        found = {name: self._keys.get(key.format(a=ARCHITECTURE)) for name, key in OPTIONAL_FIELDS.items()}
        return {
            'architectures': ['LlamaForCausalLM'],
            'vocab_size': self.shapes[NAMES['token_embd.weight']][0],
            'tie_word_embeddings': NAMES['output.weight'] not in self.shapes,
            **fields,
            **{name: value for name, value in found.items() if value is not None},
        }

    def decode(self) -> DecodeConfig:
        """Returns a greedy search with the ids of the file's tokenizer."""
        ends = self._keys.get('tokenizer.ggml.eos_token_id')
        return DecodeConfig(
            eos_ids=() if ends is None else (ends,), pad_id=self._keys.get('tokenizer.ggml.padding_token_id', 0)
        )

    def _key(self, key: str) -> Any:
        key = key.format(a=ARCHITECTURE)
        if key not in self._keys:
            raise UserError(f'{self._path} lacks {key}')
        return self._keys[key]

    def is_float(self, name: str) -> bool:
        """Whether a tensor holds numbers once it is dequantised; integer tensors are none of a model's."""
        return not re.fullmatch(r'I\d+', self.dtypes[name])

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor in float32, rows in the order of Hugging Face."""
        tensor = self._held[name]
        values = np.asarray(self._dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(self.shapes[name])
        heads = self._rotated.get(name.split('.')[-2])
        return values if heads is None else _halves(values, heads)


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a query or key matrix with (0, 2, 4 ... 1, 3, 5 ...) of each head in place of (0, 1, 2 ...).

    The first half of a head's features is then rotated with the second.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    layer = re.fullmatch(r'blk\.(\d+)\.(.+)', name)
    if layer is None:
        return NAMES.get(name, name)
    return NAMES.get(f'blk.{{i}}.{layer[2]}', name).replace('{i}', layer[1])


def _open(path: Path) -> tuple[Any, Any]:
    try:
        import gguf
    except ImportError as error:
        raise UserError("GGUF files need the package 'gguf'; pip install 'transformer_jax[gguf]'") from error
    if not path.is_file():
        raise UserError(f'{path} is not a file; give a .gguf file')
    try:
        return gguf.GGUFReader(path), gguf.dequantize
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise UserError(f'{path} is no GGUF file, or cut short: {error}') from error
