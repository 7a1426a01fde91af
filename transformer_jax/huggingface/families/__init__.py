"""Weight and config tables, one file per family, in the order in which `save_pretrained` looks for one that fits."""

from transformer_jax.huggingface.families import (
    bart,
    bert,
    bloom,
    deepseek,
    gemma2,
    gpt2,
    gpt_neox,
    llama,
    mixtral,
    modernbert,
    olmo2,
    roberta,
    t5,
    vit,
)

FAMILIES = {
    family.model_type: family
    for family in (
        bart.MARIAN,
        bart.BART,
        bart.MBART,
        bart.PEGASUS,
        t5.T5,
        gpt2.GPT2,
        llama.LLAMA,
        llama.MISTRAL,
        mixtral.MIXTRAL,
        llama.QWEN2,
        llama.QWEN3,
        gemma2.GEMMA2,
        olmo2.OLMO2,
        bloom.BLOOM,
        gpt_neox.GPT_NEOX,
        bert.BERT,
        roberta.ROBERTA,
        modernbert.MODERNBERT,
        deepseek.DEEPSEEK_V2,
        deepseek.DEEPSEEK_V3,
        vit.VIT,
    )
}
