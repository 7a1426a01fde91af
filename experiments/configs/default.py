"""The main job: English to German on the embedded software texts, in 15 minutes on 2 CPU cores."""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 4000
    return to_config_dict(
        Experiment(
            name='default',
            model=ModelConfig(
                vocab_size=vocab_size, d_model=128, d_ff=512, num_layers=3, num_heads=4, norm_position='pre',
                position='rope', layer_stack='unrolled',
            ),
            data=DataConfig(vocab_size=vocab_size, batch_tokens=1024),
            optimizer=OptimizerConfig(learning_rate=3e-3, schedule='cosine', warmup_steps=150, clip_norm=1.0),
            training=TrainingConfig(
                steps=5000, evaluate_every=500, bleu_every=1000, checkpoint_every=500, label_smoothing=0.1
            ),
            decode=DecodeConfig(beam_size=4, max_new_tokens_over_source=50, early_stopping='heuristic'),
        )
    )  # fmt: skip
