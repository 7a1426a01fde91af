"""A BERT-like encoder which fills in masked words of one novel (80 % mask, 10 % random, 10 % kept).

    python -m experiments.train --config=experiments/configs/masked_lm.py

18.4 % of the masked words of the test split are found, 18.3 % of those for validation, at losses of 5.02 and 5.01 nats,
after 1,000 steps (AMD EPYC, family 25, model 17; one of its 2 cores, 4:03 minutes).

Another text by --config.data.train=text:FILE#split, which parts it into training, validation and test.
"""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 2000
    return to_config_dict(
        Experiment(
            name='masked_lm',
            model=ModelConfig(
                kind='encoder', vocab_size=vocab_size, d_model=128, d_ff=512, num_layers=4, num_heads=4,
                position='rope', norm_position='pre', ffn='gelu', embedding_scale='none', tie_embeddings='output',
                qkv_bias=True, out_bias=True, logits_bias=True, dropout=0.1, layer_stack='unrolled', dtype='bfloat16',
            ),
            data=DataConfig(
                objective='masked_lm', train='moby_dick', vocab_size=vocab_size, source_length=128, batch_tokens=2048,
            ),
            optimizer=OptimizerConfig(
                name='adamw', learning_rate=3e-3, schedule='cosine', warmup_steps=100, weight_decay=0.1, clip_norm=1.0,
            ),
            training=TrainingConfig(
                steps=1000, log_every=50, evaluate_every=100, checkpoint_every=250, label_smoothing=0.0,
                best_metric='accuracy',
            ),
        )
    )  # fmt: skip
