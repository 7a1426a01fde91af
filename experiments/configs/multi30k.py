"""Multi30k English to German with the sizes of the published tiny Transformer.

The files come by flags: --config.data.train=train.en,train.de --config.data.valid=val.en,val.de
"""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 6000
    return to_config_dict(
        Experiment(
            name='multi30k',
            model=ModelConfig(
                vocab_size=vocab_size,
                d_model=128,
                d_ff=256,
                num_layers=4,
                num_heads=4,
                norm_position='pre',
                dropout=0.3,
            ),
            data=DataConfig(
                train='train.en,train.de', valid='val.en,val.de', test='none', vocab_size=vocab_size, batch_tokens=8192
            ),
            optimizer=OptimizerConfig(name='adam', learning_rate=5e-3, schedule='cosine', warmup_steps=500),
            training=TrainingConfig(steps=4000, bleu_every=1000, average_last=5),
            decode=DecodeConfig(beam_size=4, max_new_tokens_over_source=50),
        )
    )
