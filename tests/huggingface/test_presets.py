"""Named architectures have the number of parameters which was published, to the parameter."""

import pytest

from transformer_jax.errors import UserError
from transformer_jax.huggingface import FAMILIES
from transformer_jax.huggingface.family import write_config
from transformer_jax.huggingface.plan import make_plan
from transformer_jax.models import abstract_params, build, count_params
from transformer_jax.presets import PRESETS, preset

# Family, and parameters of the checkpoint of that name, final_logits_bias among them.
PUBLISHED = {
    'bert_base': ('bert', 109_514_298),
    'bert_large': ('bert', 335_174_458),
    'roberta_base': ('roberta', 124_697_433),
    'roberta_large': ('roberta', 355_412_057),
    'modernbert_base': ('modernbert', 149_655_232),
    'gpt2': ('gpt2', 124_439_808),
    'gpt2_medium': ('gpt2', 354_823_168),
    'gpt2_large': ('gpt2', 774_030_080),
    'gpt2_xl': ('gpt2', 1_557_611_200),
    'llama2_7b': ('llama', 6_738_415_616),
    'llama2_13b': ('llama', 13_015_864_320),
    'llama2_70b': ('llama', 68_976_648_192),
    'llama3_8b': ('llama', 8_030_261_248),
    'llama3_1_8b': ('llama', 8_030_261_248),
    'mistral_7b': ('mistral', 7_241_732_096),
    'mixtral_8x7b': ('mixtral', 46_702_792_704),
    'qwen2_0_5b': ('qwen2', 494_032_768),
    'qwen2_7b': ('qwen2', 7_615_616_512),
    'qwen3_0_6b': ('qwen3', 596_049_920),
    'qwen3_8b': ('qwen3', 8_190_735_360),
    'olmo2_7b': ('olmo2', 7_298_617_344),
    'gemma2_2b': ('gemma2', 2_614_341_888),
    'deepseek_v2_lite': ('deepseek_v2', 15_706_484_224),
    # 671B; the correction biases of 58 layers are among them.
    'deepseek_v3': ('deepseek_v3', 671_026_419_200),
    'bloom_560m': ('bloom', 559_214_592),
    'bloom_176b': ('bloom', 176_247_271_424),
    'gpt_neox_20b': ('gpt_neox', 20_554_567_680),
    't5_small': ('t5', 60_506_624),
    't5_base': ('t5', 222_903_552),
    't5_large': ('t5', 737_668_096),
    't5_3b': ('t5', 2_851_598_336),
    't5_11b': ('t5', 11_307_321_344),
    't5_v1_1_small': ('t5', 76_961_152),
    't5_v1_1_base': ('t5', 247_577_856),
    't5_v1_1_large': ('t5', 783_150_080),
    't5_v1_1_xl': ('t5', 2_849_757_184),
    't5_v1_1_xxl': ('t5', 11_135_332_352),
    'vit_b16': ('vit', 86_567_656),
    'vit_l16': ('vit', 304_326_632),
    'bart_base': ('bart', 139_470_681),
    'bart_large': ('bart', 406_341_721),
    'mbart_large': ('mbart', 611_101_867),
    'pegasus_large': ('pegasus', 568_796_007),
    'marian': ('marian', 73_944_309),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert count_params(abstract_params(build(preset(name)))[0]) == PUBLISHED[name][1]


@pytest.mark.parity
@pytest.mark.parametrize('name', PUBLISHED)
def test_the_config_which_we_write_for_a_preset_has_as_many_parameters_in_transformers(name):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    family, expected = PUBLISHED[name]
    fields = write_config(FAMILIES[family], preset(name))
    cls = getattr(transformers, fields['architectures'][0])
    with torch.device('meta'):
        model = cls(cls.config_class(**fields | {'pad_token_id': fields.get('pad_token_id', 0)}))
    own = ('final_logits_bias', 'e_score_correction_bias')
    biases = sum(buffer.numel() for path, buffer in model.named_buffers() if path.endswith(own))
    # Transformers ties T5's output matrix until a file gives it one of its own.
    own_matrix = model.lm_head.weight.numel() if name.startswith('t5_v1_1') else 0
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert learned + biases + own_matrix == expected


def test_gpt3_has_its_175_billion():
    assert count_params(abstract_params(build(preset('gpt3_175b')))[0]) == pytest.approx(175e9, rel=5e-3)


@pytest.mark.parametrize('name', ['llama2_7b', 'gemma2_2b', 'modernbert_base', 't5_v1_1_base', 'marian', 'bloom_560m'])
def test_a_preset_can_be_said_in_its_family_and_every_tensor_has_a_name(name):
    family, config = FAMILIES[PUBLISHED[name][0]], preset(name)
    assert write_config(family, config)['model_type'] == family.model_type
    assert len(make_plan(family, config)) > config.num_layers


def test_every_preset_of_a_checkpoint_is_counted():
    assert set(PRESETS) == set(PUBLISHED) | {'transformer_base', 'transformer_big', 'gpt3_175b'}


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'llama2_7b'"):
        preset('lama2_7b')
