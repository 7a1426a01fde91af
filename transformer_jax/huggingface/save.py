"""From a model and its parameters to a folder which Hugging Face's AutoModel loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError, choose
from transformer_jax.huggingface.families import FAMILIES
from transformer_jax.huggingface.family import IGNORED, Family, Fields, write_config
from transformer_jax.huggingface.generation import token_fields, write_generation
from transformer_jax.huggingface.plan import Part, bare_name, canonical_shapes, flatten, make_plan
from transformer_jax.huggingface.tensors import read_json, write_tensors
from transformer_jax.huggingface.tokenizer_files import copy_tokenizer
from transformer_jax.models import abstract_params, resize_vocabulary, unroll_params

# Said in any case, for the defaults of transformers are ids of one vocabulary, which may lie outside another.
_NO_IDS: Fields = dict.fromkeys(f'{name}_token_id' for name in ('pad', 'bos', 'eos', 'cls', 'sep'))
_OWN = ('architectures', 'model_type', 'torch_dtype', 'dtype', 'transformers_version')


def save_pretrained(
    folder: str | os.PathLike,
    model: nn.Module,
    params: Any,
    *,
    like: str | os.PathLike | None = None,
    family: str | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes config.json, safetensors and, for a model with `decode`, generation_config.json.

    Tensors keep the type of the parameters, so that `load_pretrained` gives back the same bits. Rows past the
    vocabulary (`ModelConfig.vocab_multiple`) are left out.

    Args:
      folder: made if need be; files of the same names are replaced.
      params: of the model, scanned or unrolled as its config says.
      like: the folder which the model was loaded from: gives the family, token ids and labels, and its tokenizer files
        are copied.
      family: a name of `FAMILIES`; None takes that of `like`, else the first which can say this model.
      shard_bytes: most bytes of one file, but for larger tensors.

    Raises:
      UserError: for a choice of the model which the family cannot say, naming it, and for parameters which are not
        those of the model.
    """
    config, folder = model.config.replace(vocab_multiple=1), Path(folder)
    if config != model.config:
        params = resize_vocabulary(params, abstract_params(model)[1], config.vocab_size)
    inherited = {} if like is None else read_json(Path(like) / 'config.json')
    chosen, fields = _family(config, family or inherited.get('model_type'))
    plan = make_plan(chosen, config)
    leaves = flatten(unroll_params(params, config))
    _check(config, leaves)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, _tensors(chosen, config, plan, leaves), shard_bytes)
    kept = {name: inherited[name] for name in inherited if name in IGNORED and name not in _OWN}
    if len(kept.get('id2label') or ()) == config.num_classes:
        fields = {name: value for name, value in fields.items() if name not in ('id2label', 'label2id')}
    fields = _NO_IDS | kept | token_fields(config) | fields | {'torch_dtype': config.param_dtype}
    _write_json(folder / 'config.json', fields)
    if config.decode is not None:
        _write_json(folder / 'generation_config.json', write_generation(config))
    if like is not None:
        copy_tokenizer(Path(like), folder)


def _family(config: ModelConfig, name: str | None) -> tuple[Family, Fields]:
    if name is not None:
        family = FAMILIES[choose('family', name, FAMILIES)]
        return family, write_config(family, config)
    for family in FAMILIES.values():
        try:
            return family, write_config(family, config)
        except UserError:
            continue
    raise UserError(f'none of {", ".join(FAMILIES)} can say this model; with family=... the choice in the way is named')


def _check(config: ModelConfig, leaves: dict[str, Any]):
    shapes = canonical_shapes(config)
    wrong = sorted(path for path in shapes.keys() ^ leaves.keys())
    wrong += [path for path in shapes.keys() & leaves.keys() if shapes[path] != leaves[path].shape]
    if wrong:
        raise UserError(f'parameters which are missing, unknown, or of a wrong shape: {", ".join(wrong)}')


def _tensors(family: Family, config: ModelConfig, plan: list[Part], leaves: dict) -> Iterator[tuple[str, np.ndarray]]:
    for part in plan:
        ours = [np.asarray(leaves[path]) for path in part.ours]
        tensor = part.rearrange.write(ours if part.expert is None else [matrices[part.expert] for matrices in ours])
        yield bare_name(family, config, part.name), tensor
    for name, tensor in family.write_tensors(config).items():
        yield bare_name(family, config, name), tensor.astype(jnp.dtype(config.param_dtype))


def _write_json(path: Path, fields: Fields):
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + '\n', encoding='utf-8')
