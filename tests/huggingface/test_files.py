"""Folders which are damaged, foreign or incomplete, each refused in one line; and what may be there or not."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import model_and_params

from transformer_jax.config import ModelConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.huggingface import load_pretrained, pretrained_config, save_pretrained
from transformer_jax.huggingface.plan import flatten
from transformer_jax.models import abstract_params
from transformer_jax.ops import rope
from transformer_jax.sharding import DEFAULT_RULES, MeshConfig, make_mesh, resolve

LLAMA = ModelConfig(
    kind='decoder', vocab_size=29, d_model=16, d_ff=12, num_layers=3, num_heads=4, num_kv_heads=2, position='rope',
    norm='rms', norm_position='pre', ffn='gated_silu', ffn_bias=False, embedding_scale='none', tie_embeddings='output',
    dropout=0.0, initializer='normal',
)  # fmt: skip
GPT2 = LLAMA.replace(
    num_kv_heads=None, position='learned', max_positions=8, norm='layer', norm_epsilon=1e-5, ffn='gelu_tanh',
    qkv_bias=True, out_bias=True, ffn_bias=True,
)  # fmt: skip
EMBEDDING, QUERY = 'model.embed_tokens.weight', 'model.layers.1.self_attn.q_proj.weight'


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp('exported')
    save_pretrained(folder, *model_and_params(LLAMA))
    return folder


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / 'copy')


def change_tensors(folder, change):
    tensors = load_file(folder / 'model.safetensors')
    change(tensors)
    save_file(tensors, folder / 'model.safetensors')


def change_config(folder, **fields):
    path = folder / 'config.json'
    stated = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in stated.items() if value != 'gone'}))


def refused(folder, *words, **choices):
    with pytest.raises(UserError) as error:
        load_pretrained(folder, **choices)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_what_was_exported_comes_back_bit_for_bit_with_its_config(exported):
    model, params = model_and_params(LLAMA)
    for stack in ('scan', 'unrolled'):
        back, again = load_pretrained(exported, layer_stack=stack, generation=False)
        if stack == 'scan':
            jax.tree.map(np.testing.assert_array_equal, again, params)
    assert back.config.replace(layer_stack='scan', trained_positions=None) == LLAMA


@pytest.mark.parametrize('fields, words', [
    (dict(model_type='lama'), ['model_type', "did you mean 'llama'"]),
    (dict(architectures=['LlamaForTokenClassification']), ['LlamaForTokenClassification', 'LlamaForCausalLM']),
    (dict(hidden_act='quick_gelu'), ['hidden_act', 'quick_gelu', 'gelu']),
    (dict(hidden_act=['silu']), ['hidden_act']),
    (dict(hidden_size='gone'), ['hidden_size']),
    (dict(hidden_size='16'), ['d_model']),
    (dict(quantization_config={'bits': 4}), ['quantization_config']),
    (dict(auto_map={'AutoModel': 'x.y'}), ['auto_map']),
    (dict(rope_scaling={'rope_type': 'longrope'}), ['longrope', 'yarn']),
    (dict(rope_scaling={'rope_type': 'linear', 'factor': 2.0, 'twist': 1}), ['twist']),
    (dict(num_key_value_heads=3), ['num_kv_heads']),
    (dict(vocab_size=30), ['wrong shape', EMBEDDING, '(29, 16)', '(30, 16)']),
    (dict(tie_word_embeddings=False), ['missing', 'lm_head.weight']),
])  # fmt: skip
def test_a_config_which_is_not_supported_is_refused_by_the_field_and_value(folder, fields, words):
    change_config(folder, **fields)
    refused(folder, *words)


def test_every_wrong_tensor_is_listed_by_name(folder):
    def change(tensors):
        tensors['model.layers.0.extra'] = tensors.pop('model.norm.weight')
        tensors[QUERY] = tensors[QUERY].T[:3]
        tensors[EMBEDDING] = tensors[EMBEDDING].astype(np.int32)

    change_tensors(folder, change)
    refused(folder, 'missing: model.norm.weight', 'unexpected: model.layers.0.extra', f'wrong shape: {QUERY} (3, 16)',
            f'no float: {EMBEDDING} I32')  # fmt: skip


def test_a_file_cut_short_and_one_which_is_not_there_are_one_clear_line(folder):
    path = folder / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:-5])
    refused(folder, 'model.safetensors', 'cut short')
    path.unlink()
    refused(folder, 'neither model.safetensors nor')
    (folder / 'pytorch_model.bin').write_bytes(b'')
    refused(folder, 'pickle')
    refused(folder / 'nowhere', 'config.json does not exist')
    for text in ('{', '[]', '"llama"', ''):
        (folder / 'config.json').write_text(text)
        refused(folder, 'config.json', 'JSON')


@pytest.mark.parametrize('damage', [lambda raw: raw[:-5], lambda raw: raw[:7], lambda raw: b'', lambda raw: raw + b'x',
                                    lambda raw: raw[:8] + b'[' + raw[9:]])  # fmt: skip
def test_a_damaged_file_of_tensors_is_named_with_its_size(folder, damage):
    path = folder / 'model.safetensors'
    path.write_bytes(damage(path.read_bytes()))
    refused(folder, 'model.safetensors', f'({path.stat().st_size} bytes)')


def test_numbers_of_eight_bits_are_refused_by_name_and_type(folder):
    path = folder / 'model.safetensors'
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], 'little')
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    shape = header[QUERY]['shape']
    # Four numbers of 8 bits in place of each of 32: as many bytes.
    header[QUERY] |= {'dtype': 'F8_E4M3', 'shape': [shape[0], 4 * shape[1]]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, 'little') + text + data)
    refused(folder, f'no float: {QUERY} F8_E4M3')


def test_a_shard_which_is_missing_or_lacks_a_tensor_is_named(tmp_path):
    model, params = model_and_params(LLAMA)
    save_pretrained(tmp_path, model, params, shard_bytes=3000)
    shards = sorted(tmp_path.glob('model-*.safetensors'))
    assert len(shards) > 2 and not (tmp_path / 'model.safetensors').exists()
    _, again = load_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
    index['weight_map']['phantom'] = shards[0].name
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
    refused(tmp_path, 'phantom')
    shards[1].unlink()
    refused(tmp_path, shards[1].name)


def test_nan_is_a_warning_which_names_the_tensor(folder):
    change_tensors(folder, lambda tensors: tensors[QUERY].__setitem__((0, 0), np.nan))
    with pytest.warns(UserWarning, match=QUERY):
        load_pretrained(folder)


def test_tied_and_derived_tensors_may_be_there_and_are_checked_and_logged(folder, caplog):
    caplog.set_level(logging.INFO)

    def add(tensors):
        tensors['lm_head.weight'] = tensors[EMBEDDING].copy()
        tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = rope.frequencies(4, 10000.0)[0].astype(np.float32)

    change_tensors(folder, add)
    _, params = load_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, params, model_and_params(LLAMA)[1])
    assert 'lm_head.weight is left out: tied' in caplog.text and 'inv_freq is left out' in caplog.text
    change_tensors(folder, lambda tensors: tensors['lm_head.weight'].__setitem__((0, 0), 9.0))
    refused(folder, 'unequal: lm_head.weight', EMBEDDING)
    change_tensors(folder, lambda tensors: tensors.pop(EMBEDDING))
    assert load_pretrained(folder)[1]['embedding']['embedding'][0, 0] == 9.0
    change_tensors(folder, lambda t: t['model.layers.0.self_attn.rotary_emb.inv_freq'].__setitem__(1, 9.0))
    refused(folder, 'unequal', 'inv_freq')


def test_causal_masks_of_old_files_and_a_missing_base_prefix_are_understood(tmp_path):
    model, params = model_and_params(GPT2)
    save_pretrained(tmp_path, model, params, family='gpt2')

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix('transformer.')] = tensors.pop(name)
        tensors['h.0.attn.bias'] = np.tril(np.ones((1, 1, 8, 8), np.uint8))

    change_tensors(tmp_path, change)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path)[1], params)
    change_tensors(tmp_path, lambda tensors: tensors['h.0.attn.bias'].__setitem__((0, 0, 0, 5), 1))
    refused(tmp_path, 'h.0.attn.bias', 'a causal mask')


def test_types_are_kept_or_chosen_and_never_lost(folder):
    def halve(tensors):
        tensors.update({name: value.astype(np.float16) for name, value in tensors.items()})

    change_tensors(folder, halve)
    model, params = load_pretrained(folder)
    assert model.config.param_dtype == 'float32' and params['embedding']['embedding'].dtype == np.float32
    model, params = load_pretrained(folder, 'bfloat16')
    assert params['embedding']['embedding'].dtype == jnp.bfloat16 and model.config.dtype == 'bfloat16'
    save_pretrained(folder, model, params)
    table = {'model.rotary_emb.inv_freq': rope.frequencies(4, 10000.0)[0].astype(np.float32)}
    change_tensors(folder, lambda tensors: tensors.update(table))
    again, back = load_pretrained(folder)
    assert again.config.param_dtype == 'bfloat16'
    for path, value in flatten(params).items():
        np.testing.assert_array_equal(flatten(back)[path].view(np.uint16), value.view(np.uint16))
    refused(folder, 'float31', 'float32', dtype='float31')


def test_parameters_go_straight_into_their_shardings(exported):
    config = pretrained_config(exported)
    model, host = load_pretrained(exported)
    abstract, axes = abstract_params(model)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2), devices=jax.devices()[:2])
    shardings = resolve(abstract, axes, mesh, DEFAULT_RULES)
    _, params = load_pretrained(exported, shardings=shardings)
    assert model.config == config
    placed = jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), params, shardings)
    assert all(jax.tree.leaves(placed))
    jax.tree.map(np.testing.assert_array_equal, params, host)


@pytest.mark.parametrize('name, content', [
    ('vocab.json', {'a': 0, 'b': 29}),
    ('tokenizer.json', {'model': {'vocab': {'a': 0}}, 'added_tokens': [{'id': 29}]}),
    ('tokenizer.json', {'model': {'vocab': [['a', 0.0]] * 30}}),
])  # fmt: skip
def test_a_tokenizer_with_ids_past_the_vocabulary_is_refused(folder, name, content):
    (folder / name).write_text(json.dumps(content))
    refused(folder, name, '29')


def test_tokenizer_files_labels_and_token_ids_are_taken_over(folder, tmp_path):
    (folder / 'tokenizer.json').write_text('{}')
    change_config(folder, bos_token_id=5, pad_token_id=4)
    model, params = load_pretrained(folder, generation=False)
    save_pretrained(tmp_path / 'out', model, params, like=folder)
    assert (tmp_path / 'out' / 'tokenizer.json').read_text() == '{}'
    assert json.loads((tmp_path / 'out' / 'config.json').read_text())['bos_token_id'] == 5


def test_unknown_fields_are_named_in_the_log(folder, caplog):
    change_config(folder, mystery=3)
    load_pretrained(folder)
    assert 'mystery' in caplog.text


@pytest.mark.parametrize('choices, words', [
    (dict(norm_position='deepnorm'), ['norm_position']),
    (dict(embedding_norm=True), ['embedding_norm']),
    (dict(logits_softcap=3.0), ['logits_softcap']),
])  # fmt: skip
def test_a_model_which_a_family_cannot_say_is_refused_by_the_choice(tmp_path, choices, words):
    model, params = model_and_params(LLAMA.replace(**choices))
    with pytest.raises(UserError, match='llama cannot say ' + words[0]):
        save_pretrained(tmp_path, model, params, family='llama')


def test_parameters_of_another_model_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match='decoder/final_norm/bias'):
        save_pretrained(tmp_path, model_and_params(LLAMA)[0], model_and_params(GPT2)[1], family='llama')


def test_generation_settings_come_and_go(folder):
    settings = dict(num_beams=3, length_penalty=0.8, early_stopping='never', max_new_tokens=7, eos_token_id=[3, 4],
                    pad_token_id=0, bad_words_ids=[[5], [6, 7]], no_repeat_ngram_size=2)  # fmt: skip
    (folder / 'generation_config.json').write_text(json.dumps(settings))
    model, params = load_pretrained(folder)
    expected = DecodeConfig(beam_size=3, length_penalty='length', length_penalty_alpha=0.8, early_stopping='bound',
                            max_new_tokens=7, eos_ids=(3, 4), forbidden_tokens=(5, (6, 7)), no_repeat_ngram_size=2,
                            pad_id=0)  # fmt: skip
    assert model.config.decode == expected
    save_pretrained(folder, model, params)
    assert load_pretrained(folder)[0].config.decode == expected


@pytest.mark.parametrize('settings, word', [
    (dict(penalty_alpha=0.6), 'penalty_alpha'),
    (dict(typical_p=0.9), 'typical_p'),
    (dict(max_length=33), 'max_length'),
    (dict(num_beams=2, do_sample=True), 'beam_size'),
])  # fmt: skip
def test_generation_settings_which_have_no_equal_are_refused_by_name(folder, settings, word):
    (folder / 'generation_config.json').write_text(json.dumps(settings))
    refused(folder, word, 'generation=False')
    assert load_pretrained(folder, generation=False)[0].config.decode is None


def test_sampling_settings_are_those_of_transformers(folder):
    (folder / 'generation_config.json').write_text(json.dumps(dict(do_sample=True, temperature=0.6, top_p=0.9)))
    decode = load_pretrained(folder)[0].config.decode
    assert (decode.sample, decode.temperature, decode.top_p, decode.top_k) == (True, 0.6, 0.9, 50)
