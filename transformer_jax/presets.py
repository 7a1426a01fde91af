"""Named architectures, each with the paper or the release it stands for."""

from __future__ import annotations

import math
from typing import Any

from transformer_jax.config import ModelConfig, RopeScaling
from transformer_jax.errors import choose
from transformer_jax.subconfigs import LatentConfig, MixtureConfig, PatchConfig

Choices = dict[str, Any]

# Vaswani et al. 2017, table 3.
_TRANSFORMER_BIG = dict(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)

_NORMAL = dict(initializer='normal', initializer_stddev=0.02)
_BIASES = dict(qkv_bias=True, out_bias=True, ffn_bias=True)

# Devlin et al. 2019, section 3; the masked-LM head is that of the released code.
_BERT_BASE = dict(
    kind='encoder', vocab_size=30522, d_model=768, d_ff=3072, num_layers=12, num_heads=12, position='learned',
    max_positions=512, norm_epsilon=1e-12, norm_position='post', embedding_norm=True, ffn='gelu',
    embedding_scale='none', tie_embeddings='output', token_types=2, logits_bias=True, head_activation='gelu',
    head_norm=True, dropout=0.1, attention_dropout=0.1, **_BIASES, **_NORMAL,
)  # fmt: skip
_BERT_LARGE = dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16)

# Liu et al. 2019; positions are counted from 2.
_ROBERTA = dict(vocab_size=50265, position_offset=2, token_types=1, norm_epsilon=1e-5)

# Warner et al. 2024.
_MODERNBERT_BASE = dict(
    kind='encoder', vocab_size=50368, d_model=768, d_ff=1152, num_layers=22, num_heads=12, position='rope',
    rope_theta=160000.0, rope_local_theta=10000.0, trained_positions=8192, window=65,
    layer_pattern=('global', 'local', 'local'), norm_epsilon=1e-5, norm_bias=False, norm_position='pre',
    first_norm=False, embedding_norm=True, ffn='gated_gelu', ffn_bias=False, embedding_scale='none',
    tie_embeddings='output', logits_bias=True, head_activation='gelu', head_bias=False, head_norm=True,
    dropout=0.0, **_NORMAL,
)  # fmt: skip

# Radford et al. 2019.
_GPT2 = dict(
    kind='decoder', vocab_size=50257, d_model=768, d_ff=3072, num_layers=12, num_heads=12, position='learned',
    max_positions=1024, norm_epsilon=1e-5, norm_position='pre', ffn='gelu_tanh', embedding_scale='none',
    tie_embeddings='output', dropout=0.1, attention_dropout=0.1, **_BIASES, **_NORMAL,
)  # fmt: skip

# Brown et al. 2020, table 2.1; every layer dense.
_GPT3_175B = dict(d_model=12288, d_ff=49152, num_layers=96, num_heads=96, max_positions=2048)

# Touvron et al. 2023.
_LLAMA = dict(
    kind='decoder', vocab_size=32000, d_model=4096, d_ff=11008, num_layers=32, num_heads=32, position='rope',
    trained_positions=4096, norm='rms', norm_epsilon=1e-5, norm_position='pre', ffn='gated_silu', ffn_bias=False,
    embedding_scale='none', tie_embeddings='none', dropout=0.0, **_NORMAL,
)  # fmt: skip
# Grattafiori et al. 2024.
_LLAMA3_8B = dict(vocab_size=128256, d_ff=14336, num_kv_heads=8, rope_theta=500000.0, trained_positions=8192)
_LLAMA3_1 = dict(
    trained_positions=131072,
    rope_scaling=RopeScaling('llama3', 8.0, 8192, low_frequency_factor=1.0, high_frequency_factor=4.0),
)
# Jiang et al. 2023.
_MISTRAL_7B = dict(d_ff=14336, num_kv_heads=8, window=4096, layer_pattern=('local',), trained_positions=32768)
# Jiang et al. 2024.
_MIXTRAL_8X7B = dict(
    d_ff=14336, num_kv_heads=8, rope_theta=1000000.0, trained_positions=32768, mixture=MixtureConfig(8, 2)
)
# Yang et al. 2024.
_QWEN2_7B = dict(
    vocab_size=152064, d_model=3584, d_ff=18944, num_layers=28, num_heads=28, num_kv_heads=4, qkv_bias=True,
    norm_epsilon=1e-6, rope_theta=1000000.0, trained_positions=131072,
)  # fmt: skip
_QWEN2_0_5B = dict(
    vocab_size=151936, d_model=896, d_ff=4864, num_layers=24, num_heads=14, num_kv_heads=2, tie_embeddings='output'
)
# Yang et al. 2025.
_QWEN3_8B = dict(
    vocab_size=151936, d_model=4096, d_ff=12288, num_layers=36, num_heads=32, num_kv_heads=8, qk_norm='head',
    norm_epsilon=1e-6, rope_theta=1000000.0, trained_positions=40960,
)  # fmt: skip
_QWEN3_0_6B = dict(d_model=1024, d_ff=3072, num_layers=28, num_heads=16, d_k=128, tie_embeddings='output')
# OLMo team 2024.
_OLMO2_7B = dict(
    vocab_size=100352, norm_position='res_post', qk_norm='full', norm_epsilon=1e-6, rope_theta=500000.0
)
# DeepSeek-AI 2024 (V2), section 2 and appendix B, and 2024 (V3), section 4.2.
_YARN_40 = dict(factor=40.0, original_positions=4096)
_DEEPSEEK_V2_LITE = dict(
    vocab_size=102400, d_model=2048, d_ff=10944, num_layers=27, num_heads=16, d_k=192, d_v=128,
    attention_scale=192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2, latent=LatentConfig(512, None, 64),
    mixture=MixtureConfig(64, 6, d_ff=1408, shared_experts=2, normalize=False, dense_layers=1), norm_epsilon=1e-6,
    rope_layout='interleaved', rope_scaling=RopeScaling('yarn', **_YARN_40, mscale=0.707, mscale_all_dim=0.707),
    trained_positions=163840,
)  # fmt: skip
_DEEPSEEK_V3 = dict(
    vocab_size=129280, d_model=7168, d_ff=18432, num_layers=61, num_heads=128, d_k=192, d_v=128,
    attention_scale=192**-0.5 * (0.1 * math.log(40) + 1) ** 2, latent=LatentConfig(512, 1536, 64),
    mixture=MixtureConfig(
        256, 8, d_ff=2048, shared_experts=1, affinity='sigmoid', scale=2.5, correction_bias=True, groups=8,
        groups_per_token=4, group_score='top_two', dense_layers=3,
    ), norm_epsilon=1e-6, rope_layout='interleaved',
    rope_scaling=RopeScaling('yarn', **_YARN_40, mscale=1.0, mscale_all_dim=1.0), trained_positions=163840,
)  # fmt: skip
# Gemma team 2024.
_GEMMA2_2B = dict(
    vocab_size=256000, d_model=2304, d_ff=9216, num_layers=26, num_heads=8, num_kv_heads=4, d_k=256,
    attention_scale=256**-0.5, attention_softcap=50.0, logits_softcap=30.0, window=4096,
    layer_pattern=('local', 'global'), trained_positions=8192, norm='rms_plus_one', norm_epsilon=1e-6,
    norm_position='sandwich', ffn='gated_gelu_tanh', embedding_scale='sqrt_d_model', tie_embeddings='output',
)  # fmt: skip

# BigScience 2022.
_BLOOM_560M = dict(
    kind='decoder', vocab_size=250880, d_model=1024, d_ff=4096, num_layers=24, num_heads=16, position='alibi',
    norm_epsilon=1e-5, norm_position='pre', embedding_norm=True, ffn='gelu_tanh', embedding_scale='none',
    tie_embeddings='output', dropout=0.0, **_BIASES, **_NORMAL,
)  # fmt: skip
_BLOOM_176B = dict(d_model=14336, d_ff=57344, num_layers=70, num_heads=112)

# Black et al. 2022.
_GPT_NEOX_20B = dict(
    kind='decoder', vocab_size=50432, d_model=6144, d_ff=24576, num_layers=44, num_heads=64, position='rope',
    rope_fraction=0.25, trained_positions=2048, norm_epsilon=1e-5, norm_position='parallel_two_norms', ffn='gelu_tanh',
    embedding_scale='none', tie_embeddings='none', dropout=0.0, **_BIASES, **_NORMAL,
)  # fmt: skip

# Raffel et al. 2020, section 3.1 and table 14; v1.1 as released with Shazeer 2020's gates.
_T5 = dict(
    kind='encoder_decoder', vocab_size=32128, d_model=512, d_ff=2048, num_layers=6, num_heads=8, d_k=64,
    attention_scale=1.0, position='relative', norm='rms', norm_position='pre', ffn='relu', ffn_bias=False,
    embedding_scale='none', tie_embeddings='all', logits_scale=512**-0.5, dropout=0.1, attention_dropout=0.1,
    ffn_dropout=0.1,
)  # fmt: skip
_T5_SIZES = {
    'small': {},
    'base': dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12, logits_scale=768**-0.5),
    'large': dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, logits_scale=1024**-0.5),
    '3b': dict(d_model=1024, d_ff=16384, num_layers=24, num_heads=32, d_k=128, logits_scale=1024**-0.5),
    '11b': dict(d_model=1024, d_ff=65536, num_layers=24, num_heads=128, d_k=128, logits_scale=1024**-0.5),
}
_T5_V1_1 = dict(ffn='gated_gelu_tanh', tie_embeddings='inputs', logits_scale=1.0)
_T5_V1_1_SIZES = {
    'small': dict(d_ff=1024, num_layers=8, num_heads=6),
    'base': dict(d_model=768, num_layers=12, num_heads=12),
    'large': dict(d_model=1024, d_ff=2816, num_layers=24, num_heads=16),
    'xl': dict(d_model=2048, d_ff=5120, num_layers=24, num_heads=32),
    'xxl': dict(d_model=4096, d_ff=10240, num_layers=24, num_heads=64),
}

# Dosovitskiy et al. 2021, table 1; as fine-tuned on ImageNet.
_VIT_B16 = dict(
    kind='vision', d_model=768, d_ff=3072, num_layers=12, num_heads=12, position='learned', patches=PatchConfig(),
    norm_epsilon=1e-12, norm_position='pre', ffn='gelu', embedding_scale='none', tie_embeddings='none', head='classes',
    num_classes=1000, pooling='first', dropout=0.0, **_BIASES, **_NORMAL,
)  # fmt: skip
_VIT_L16 = dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16)

# Lewis et al. 2020.
_BART_BASE = dict(
    kind='encoder_decoder', vocab_size=50265, d_model=768, d_ff=3072, num_layers=6, num_heads=12, position='learned',
    max_positions=1024, position_offset=2, norm_epsilon=1e-5, norm_position='post', embedding_norm=True, ffn='gelu',
    embedding_scale='none', tie_embeddings='all', logits_bias=True, dropout=0.1, **_BIASES, **_NORMAL,
)  # fmt: skip
_BART_LARGE = dict(d_model=1024, d_ff=4096, num_layers=12, num_heads=16)
# Liu et al. 2020.
_MBART_LARGE = _BART_LARGE | dict(vocab_size=250027, norm_position='pre', embedding_scale='sqrt_d_model')
# Zhang et al. 2020.
_PEGASUS_LARGE = _BART_LARGE | dict(
    vocab_size=96103, num_layers=16, position='sinusoidal_halves', position_offset=0, norm_position='pre',
    embedding_norm=False, ffn='relu', embedding_scale='sqrt_d_model',
)  # fmt: skip
# Tiedemann and Thottingal 2020 (OPUS-MT, English to German).
_MARIAN = dict(
    vocab_size=58101, d_model=512, d_ff=2048, num_layers=6, num_heads=8, max_positions=512,
    position='sinusoidal_halves', position_offset=0, embedding_norm=False, ffn='silu', embedding_scale='sqrt_d_model',
)  # fmt: skip

PRESETS: dict[str, Choices] = {
    'transformer_base': {},
    'transformer_big': _TRANSFORMER_BIG,
    'bert_base': _BERT_BASE,
    'bert_large': _BERT_BASE | _BERT_LARGE,
    'roberta_base': _BERT_BASE | _ROBERTA,
    'roberta_large': _BERT_BASE | _BERT_LARGE | _ROBERTA,
    'modernbert_base': _MODERNBERT_BASE,
    'gpt2': _GPT2,
    'gpt2_medium': _GPT2 | dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    'gpt2_large': _GPT2 | dict(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    'gpt2_xl': _GPT2 | dict(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    'gpt3_175b': _GPT2 | _GPT3_175B,
    'llama2_7b': _LLAMA,
    'llama2_13b': _LLAMA | dict(d_model=5120, d_ff=13824, num_layers=40, num_heads=40),
    'llama2_70b': _LLAMA | dict(d_model=8192, d_ff=28672, num_layers=80, num_heads=64, num_kv_heads=8),
    'llama3_8b': _LLAMA | _LLAMA3_8B,
    'llama3_1_8b': _LLAMA | _LLAMA3_8B | _LLAMA3_1,
    'mistral_7b': _LLAMA | _MISTRAL_7B,
    'mixtral_8x7b': _LLAMA | _MIXTRAL_8X7B,
    'qwen2_0_5b': _LLAMA | _QWEN2_7B | _QWEN2_0_5B,
    'qwen2_7b': _LLAMA | _QWEN2_7B,
    'qwen3_0_6b': _LLAMA | _QWEN3_8B | _QWEN3_0_6B,
    'qwen3_8b': _LLAMA | _QWEN3_8B,
    'olmo2_7b': _LLAMA | _OLMO2_7B,
    'gemma2_2b': _LLAMA | _GEMMA2_2B,
    'deepseek_v2_lite': _LLAMA | _DEEPSEEK_V2_LITE,
    'deepseek_v3': _LLAMA | _DEEPSEEK_V3,
    'bloom_560m': _BLOOM_560M,
    'bloom_176b': _BLOOM_560M | _BLOOM_176B,
    'gpt_neox_20b': _GPT_NEOX_20B,
    **{f't5_{size}': _T5 | sizes for size, sizes in _T5_SIZES.items()},
    **{f't5_v1_1_{size}': _T5 | _T5_V1_1 | sizes for size, sizes in _T5_V1_1_SIZES.items()},
    'vit_b16': _VIT_B16,
    'vit_l16': _VIT_B16 | _VIT_L16,
    'bart_base': _BART_BASE,
    'bart_large': _BART_BASE | _BART_LARGE,
    'mbart_large': _BART_BASE | _MBART_LARGE,
    'pegasus_large': _BART_BASE | _PEGASUS_LARGE,
    'marian': _BART_BASE | _MARIAN,
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """Returns the ModelConfig of a named architecture, with some choices changed.

    Raises:
      UserError: for an unknown preset or choice, with the nearest valid name.
    """
    return ModelConfig(**PRESETS[choose('preset', name, PRESETS)]).replace(**changes)
