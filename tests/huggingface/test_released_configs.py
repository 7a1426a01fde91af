"""config.json files as they were released, years apart: each is understood whole, and says what the preset says."""

import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.huggingface import FAMILIES
from transformer_jax.huggingface.family import read_config
from transformer_jax.huggingface.generation import read_generation
from transformer_jax.presets import preset

_BERT = dict(
    attention_probs_dropout_prob=0.1, gradient_checkpointing=False, hidden_act='gelu', hidden_dropout_prob=0.1,
    hidden_size=768, initializer_range=0.02, intermediate_size=3072, layer_norm_eps=1e-12, max_position_embeddings=512,
    model_type='bert', num_attention_heads=12, num_hidden_layers=12, pad_token_id=0, position_embedding_type='absolute',
    transformers_version='4.6.0.dev0', type_vocab_size=2, use_cache=True, vocab_size=30522,
    architectures=['BertForMaskedLM'],
)  # fmt: skip
_LLAMA = dict(
    architectures=['LlamaForCausalLM'], bos_token_id=1, eos_token_id=2, hidden_act='silu', hidden_size=4096,
    initializer_range=0.02, intermediate_size=11008, max_position_embeddings=4096, model_type='llama',
    num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, pretraining_tp=1, rms_norm_eps=1e-5,
    rope_scaling=None, tie_word_embeddings=False, torch_dtype='float16', transformers_version='4.31.0.dev0',
    use_cache=True, vocab_size=32000,
)  # fmt: skip
_BART = dict(
    activation_dropout=0.0, activation_function='gelu', add_bias_logits=False, add_final_layer_norm=False,
    architectures=['BartForConditionalGeneration'], attention_dropout=0.0, bos_token_id=0, classif_dropout=0.1,
    classifier_dropout=0.0, d_model=768, decoder_attention_heads=12, decoder_ffn_dim=3072, decoder_layerdrop=0.0,
    decoder_layers=6, decoder_start_token_id=2, dropout=0.1, early_stopping=True, encoder_attention_heads=12,
    encoder_ffn_dim=3072, encoder_layerdrop=0.0, encoder_layers=6, eos_token_id=2, forced_eos_token_id=2,
    gradient_checkpointing=False, id2label={'0': 'LABEL_0'}, init_std=0.02, is_encoder_decoder=True,
    label2id={'LABEL_0': 0}, max_position_embeddings=1024, model_type='bart', no_repeat_ngram_size=3,
    normalize_before=False, normalize_embedding=True, num_beams=4, num_hidden_layers=6, pad_token_id=1,
    scale_embedding=False, task_specific_params={'summarization': {'num_beams': 4}}, use_cache=True, vocab_size=50265,
)  # fmt: skip
_T5 = dict(
    architectures=['T5ForConditionalGeneration'], d_ff=2048, d_kv=64, d_model=512, decoder_start_token_id=0,
    dropout_rate=0.1, eos_token_id=1, initializer_factor=1.0, is_encoder_decoder=True, layer_norm_epsilon=1e-6,
    model_type='t5', n_positions=512, num_heads=8, num_layers=6, output_past=True, pad_token_id=0,
    relative_attention_num_buckets=32, task_specific_params={'summarization': {}}, vocab_size=32128,
)  # fmt: skip

_DEEPSEEK = dict(
    attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001, ep_size=1, hidden_act='silu',
    initializer_range=0.02, kv_lora_rank=512, max_position_embeddings=163840, moe_layer_freq=1, pretraining_tp=1,
    qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6, rope_theta=10000, seq_aux=True,
    tie_word_embeddings=False, torch_dtype='bfloat16', transformers_version='4.33.1', use_cache=True, v_head_dim=128,
)  # fmt: skip
_YARN = dict(type='yarn', factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1)

RELEASED = {
    'bert_base': _BERT,
    'roberta_base': _BERT | dict(
        architectures=['RobertaForMaskedLM'], model_type='roberta', bos_token_id=0, eos_token_id=2, pad_token_id=1,
        layer_norm_eps=1e-5, max_position_embeddings=514, type_vocab_size=1, vocab_size=50265),
    'modernbert_base': dict(
        architectures=['ModernBertForMaskedLM'], attention_bias=False, attention_dropout=0.0, bos_token_id=50281,
        classifier_activation='gelu', classifier_bias=False, classifier_dropout=0.0, classifier_pooling='mean',
        cls_token_id=50281, decoder_bias=True, deterministic_flash_attn=False, embedding_dropout=0.0,
        eos_token_id=50282, global_attn_every_n_layers=3, global_rope_theta=160000.0, gradient_checkpointing=False,
        hidden_activation='gelu', hidden_size=768, initializer_cutoff_factor=2.0, initializer_range=0.02,
        intermediate_size=1152, layer_norm_eps=1e-5, local_attention=128, local_rope_theta=10000.0,
        max_position_embeddings=8192, mlp_bias=False, mlp_dropout=0.0, model_type='modernbert', norm_bias=False,
        norm_eps=1e-5, num_attention_heads=12, num_hidden_layers=22, pad_token_id=50283,
        position_embedding_type='absolute', reference_compile=None, sep_token_id=50282, sparse_pred_ignore_index=-100,
        sparse_prediction=False, tie_word_embeddings=True, torch_dtype='float32', vocab_size=50368),
    'gpt2': dict(
        activation_function='gelu_new', architectures=['GPT2LMHeadModel'], attn_pdrop=0.1, bos_token_id=50256,
        embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-5, model_type='gpt2',
        n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, resid_pdrop=0.1, summary_activation=None,
        summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type='cls_index', summary_use_proj=True,
        task_specific_params={'text-generation': {'do_sample': True, 'max_length': 50}}, vocab_size=50257),
    'llama2_7b': _LLAMA,
    'llama3_1_8b': _LLAMA | dict(
        attention_bias=False, attention_dropout=0.0, bos_token_id=128000, eos_token_id=128001, intermediate_size=14336,
        max_position_embeddings=131072, mlp_bias=False, num_key_value_heads=8, rope_theta=500000.0, vocab_size=128256,
        torch_dtype='bfloat16', rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                  original_max_position_embeddings=8192, rope_type='llama3')),
    'mistral_7b': _LLAMA | dict(
        architectures=['MistralForCausalLM'], intermediate_size=14336, max_position_embeddings=32768,
        model_type='mistral', num_key_value_heads=8, rope_theta=10000.0, sliding_window=4096, torch_dtype='bfloat16'),
    'mixtral_8x7b': _LLAMA | dict(
        architectures=['MixtralForCausalLM'], attention_dropout=0.0, intermediate_size=14336,
        max_position_embeddings=32768, model_type='mixtral', num_experts_per_tok=2, num_key_value_heads=8,
        num_local_experts=8, output_router_logits=False, rope_theta=1000000.0, router_aux_loss_coef=0.02,
        sliding_window=None, torch_dtype='bfloat16'),
    'qwen2_7b': _LLAMA | dict(
        architectures=['Qwen2ForCausalLM'], attention_dropout=0.0, hidden_size=3584, intermediate_size=18944,
        max_position_embeddings=131072, max_window_layers=28, model_type='qwen2', num_attention_heads=28,
        num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=131072,
        use_sliding_window=False, vocab_size=152064),
    'qwen3_8b': _LLAMA | dict(
        architectures=['Qwen3ForCausalLM'], attention_bias=False, attention_dropout=0.0, head_dim=128,
        intermediate_size=12288, max_position_embeddings=40960, max_window_layers=36, model_type='qwen3',
        num_hidden_layers=36, num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1000000, sliding_window=None,
        use_sliding_window=False, vocab_size=151936),
    'olmo2_7b': _LLAMA | dict(
        architectures=['Olmo2ForCausalLM'], attention_bias=False, attention_dropout=0.0, model_type='olmo2',
        rms_norm_eps=1e-6, rope_theta=500000, vocab_size=100352),
    'gemma2_2b': dict(
        architectures=['Gemma2ForCausalLM'], attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=50.0,
        bos_token_id=2, cache_implementation='hybrid', eos_token_id=1, final_logit_softcapping=30.0, head_dim=256,
        hidden_act='gelu_pytorch_tanh', hidden_activation='gelu_pytorch_tanh', hidden_size=2304, initializer_range=0.02,
        intermediate_size=9216, max_position_embeddings=8192, model_type='gemma2', num_attention_heads=8,
        num_hidden_layers=26, num_key_value_heads=4, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
        rope_theta=10000.0, sliding_window=4096, torch_dtype='float32', use_cache=True, vocab_size=256000),
    'bloom_560m': dict(
        apply_residual_connection_post_layernorm=False, architectures=['BloomForCausalLM'], attention_dropout=0.0,
        attention_softmax_in_fp32=True, bias_dropout_fusion=True, bos_token_id=1, eos_token_id=2, hidden_dropout=0.0,
        initializer_range=0.02, layer_norm_epsilon=1e-5, masked_softmax_fusion=True, model_type='bloom', n_embed=1024,
        n_inner=None, n_layer=24, num_attention_heads=16, offset_alibi=100, pad_token_id=3, pretraining_tp=1,
        seq_length=2048, skip_bias_add=True, skip_bias_add_qkv=False, unk_token_id=0, use_cache=False,
        vocab_size=250880),
    'gpt_neox_20b': dict(
        architectures=['GPTNeoXForCausalLM'], attention_probs_dropout_prob=0, bos_token_id=0, eos_token_id=0,
        hidden_act='gelu_fast', hidden_dropout_prob=0, hidden_size=6144, initializer_range=0.02,
        intermediate_size=24576, layer_norm_eps=1e-5, max_position_embeddings=2048, model_type='gpt_neox',
        num_attention_heads=64, num_hidden_layers=44, rotary_emb_base=10000, rotary_pct=0.25,
        tie_word_embeddings=False, torch_dtype='float16', use_cache=True, vocab_size=50432),
    'deepseek_v2_lite': _DEEPSEEK | dict(
        architectures=['DeepseekV2ForCausalLM'], auto_map={'AutoConfig': 'configuration_deepseek.DeepseekV2Config'},
        bos_token_id=100000, eos_token_id=100001, first_k_dense_replace=1, hidden_size=2048, intermediate_size=10944,
        model_type='deepseek_v2', moe_intermediate_size=1408, n_group=1, n_routed_experts=64, n_shared_experts=2,
        norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
        num_key_value_heads=16, q_lora_rank=None, rope_scaling=_YARN | dict(mscale=0.707, mscale_all_dim=0.707),
        routed_scaling_factor=1.0, scoring_func='softmax', topk_group=1, topk_method='greedy', vocab_size=102400),
    # Without its quantization_config: stored in bf16.
    'deepseek_v3': _DEEPSEEK | dict(
        architectures=['DeepseekV3ForCausalLM'], bos_token_id=0, eos_token_id=1, first_k_dense_replace=3,
        hidden_size=7168, intermediate_size=18432, model_type='deepseek_v3', moe_intermediate_size=2048, n_group=8,
        n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8,
        num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536,
        rope_scaling=_YARN | dict(mscale=1.0, mscale_all_dim=1.0), routed_scaling_factor=2.5, scoring_func='sigmoid',
        topk_group=4, topk_method='noaux_tc', vocab_size=129280),
    'vit_b16': dict(
        architectures=['ViTForImageClassification'], attention_probs_dropout_prob=0.0, hidden_act='gelu',
        hidden_dropout_prob=0.0, hidden_size=768, id2label={str(i): f'LABEL_{i}' for i in range(1000)}, image_size=224,
        initializer_range=0.02, intermediate_size=3072, label2id={}, layer_norm_eps=1e-12, model_type='vit',
        num_attention_heads=12, num_channels=3, num_hidden_layers=12, patch_size=16, qkv_bias=True),
    't5_small': _T5,
    't5_v1_1_base': _T5 | dict(
        d_model=768, feed_forward_proj='gated-gelu', num_decoder_layers=12, num_heads=12, num_layers=12,
        tie_word_embeddings=False),
    'bart_base': _BART,
    'marian': _BART | dict(
        _name_or_path='/tmp/Helsinki-NLP/opus-mt-en-de', activation_function='swish', architectures=['MarianMTModel'],
        bad_words_ids=[[58100]], d_model=512, decoder_attention_heads=8, decoder_ffn_dim=2048,
        decoder_start_token_id=58100, decoder_vocab_size=58101, encoder_attention_heads=8, encoder_ffn_dim=2048,
        eos_token_id=0, forced_eos_token_id=0, max_length=512, max_position_embeddings=512, model_type='marian',
        normalize_embedding=False, num_beams=6, pad_token_id=58100, scale_embedding=True, vocab_size=58101,
        share_encoder_decoder_embeddings=True, static_position_embeddings=True, no_repeat_ngram_size=0,
        early_stopping=False),
}  # fmt: skip


@pytest.mark.parametrize('name', RELEASED)
def test_a_released_config_is_understood_whole_and_says_what_the_preset_says(name):
    fields = RELEASED[name]
    names = frozenset({'lm_head.weight'} if name == 't5_v1_1_base' else ())
    choices, unknown = read_config(FAMILIES[fields['model_type']], fields, names, 'config.json')
    assert not unknown
    expected = preset(name)
    read = ModelConfig(**choices, initializer=expected.initializer)
    same_depth = read.replace(num_decoder_layers=None) if read.depth('decoder') == read.num_layers else read
    assert same_depth == expected


def test_search_settings_of_a_translation_model_stand_in_its_config(tmp_path):
    decode = read_generation(tmp_path, RELEASED['marian'], preset('marian'))
    assert decode == DecodeConfig(
        max_new_tokens=511, beam_size=6, length_penalty='length', length_penalty_alpha=1.0, early_stopping='heuristic',
        forbidden_tokens=(58100,), forced_last_token=0, eos_ids=(0,), pad_id=58100, decoder_start_id=58100,
    )  # fmt: skip


def test_a_limit_of_all_positions_is_no_limit_of_its_own(tmp_path):
    (tmp_path / 'generation_config.json').write_text(
        '{"bos_token_id": 1, "do_sample": true, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.6, '
        '"max_length": 4096, "top_p": 0.9, "transformers_version": "4.31.0.dev0"}'
    )
    decode = read_generation(tmp_path, RELEASED['llama2_7b'], preset('llama2_7b'))
    assert (decode.max_new_tokens, decode.top_p, decode.eos_ids) == (None, 0.9, (2,))
