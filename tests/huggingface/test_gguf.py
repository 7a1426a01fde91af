"""GGUF files: written by the format's own library in its own layout, read back as the same parameters."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import model_and_params

from transformer_jax.config import ModelConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface import load_pretrained, save_pretrained
from transformer_jax.huggingface.gguf import load_gguf

pytestmark = pytest.mark.parity
gguf = pytest.importorskip('gguf')

LLAMA = ModelConfig(
    kind='decoder', vocab_size=29, d_model=64, d_ff=96, num_layers=2, num_heads=4, num_kv_heads=2, position='rope',
    norm='rms', norm_position='pre', ffn='gated_silu', ffn_bias=False, embedding_scale='none', tie_embeddings='none',
    dropout=0.0, initializer='normal', rope_theta=5000.0, norm_epsilon=2**-17,
)  # fmt: skip


def converted(name, value):
    """Name and value of a tensor as llama.cpp's convert_hf_to_gguf.py writes it: a permutation of its own."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LLAMA.num_layers)
    heads = {'q_proj': LLAMA.num_heads, 'k_proj': LLAMA.kv_heads}.get(name.split('.')[-2])
    if heads is not None:
        value = value.reshape(heads, 2, value.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
    return names.get_name(name, try_suffixes=('.weight',)), value


def write(folder, path, quantization=None, architecture='llama', left_out=(), **keys):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LLAMA.num_layers)
    writer.add_embedding_length(LLAMA.d_model)
    writer.add_feed_forward_length(LLAMA.d_ff)
    writer.add_head_count(LLAMA.num_heads)
    writer.add_head_count_kv(LLAMA.kv_heads)
    writer.add_rope_dimension_count(keys.pop('rotated', LLAMA.key_dim))
    writer.add_rope_freq_base(LLAMA.rope_theta)
    writer.add_layer_norm_rms_eps(LLAMA.norm_epsilon)
    writer.add_context_length(77)
    writer.add_eos_token_id(5)
    for key, value in keys.items():
        writer.add_float32(key.replace('__', '.'), value)
    for name, value in load_file(folder / 'model.safetensors').items():
        theirs, value = converted(name, value)
        if name in left_out:
            continue
        if quantization is None or value.ndim == 1:
            writer.add_tensor(theirs, value)
        else:
            writer.add_tensor(theirs, gguf.quantize(value, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('exported')
    save_pretrained(folder, *model_and_params(LLAMA), family='llama')
    return folder


@pytest.mark.parametrize('stack', ['scan', 'unrolled'])
def test_a_file_of_full_precision_gives_the_parameters_bit_for_bit(folder, tmp_path, stack):
    model, params = load_gguf(write(folder, tmp_path / 'a.gguf'), layer_stack=stack)
    expected_model, expected = load_pretrained(folder, layer_stack=stack, generation=False)
    assert model.config.replace(decode=None, trained_positions=None) == expected_model.config.replace(
        trained_positions=None
    )
    assert model.config.trained_positions == 77 and model.config.decode == DecodeConfig(eos_ids=(5,))
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize('name, levels', [('Q8_0', 127), ('Q4_1', 15), ('F16', None)])
def test_quantised_tensors_come_back_within_half_a_level_of_their_block(folder, tmp_path, name, levels):
    model, params = load_gguf(write(folder, tmp_path / 'a.gguf', gguf.GGMLQuantizationType[name]), 'float32')
    _, expected = load_pretrained(folder, generation=False)
    for found, exact in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        # Scale and offset are themselves rounded to 16 bits.
        largest = np.abs(exact).max()
        step = 0 if levels is None else largest * (2 if name == 'Q4_1' else 1) / levels
        assert np.abs(found - exact).max() <= 0.51 * step + largest * 2**-9
    assert model.config.param_dtype == 'float32'


def refused(path, *words):
    with pytest.raises(UserError) as error:
        load_gguf(path)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_what_cannot_be_read_is_told_in_one_line(folder, tmp_path):
    whole = write(folder, tmp_path / 'whole.gguf')
    refused(tmp_path / 'none.gguf', 'is not a file')
    for size in (3, 40, 900, 20_000):
        (tmp_path / 'cut.gguf').write_bytes(whole.read_bytes()[:size])
        refused(tmp_path / 'cut.gguf', 'no GGUF file, or cut short')
    refused(write(folder, tmp_path / 'b.gguf', architecture='gpt2'), "'gpt2'", "only 'llama'")
    refused(write(folder, tmp_path / 'c.gguf', left_out=['model.norm.weight']), 'missing: model.norm.weight')
    refused(write(folder, tmp_path / 'd.gguf', rotated=8), 'rotates 8 of the 16 features')
    scaled = write(folder, tmp_path / 'e.gguf', llama__rope__scaling__factor=2.0)
    refused(scaled, 'llama.rope.scaling.factor')
