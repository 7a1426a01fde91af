"""An encoder which tells from a sentence of a State of the Union address in which era it was given.

    python -m experiments.train --config=experiments/configs/classify.py

56.8 % of the 264 test sentences, and 55.9 % of the 290 for validation, get the right one of three eras after 400 steps:
before 1880, 1880 to 1944, from 1945. The sentences of one address are all in one split. With 2,045 sentences to learn
from the model fits them and not their kind: the best validation loss is that of step 100.
(Intel Xeon (family 6, model 167), 2 shared cores with AMX; 80 seconds.) With all sentences of the corpus of which the
embedded ones are a slice, --config.data.train=labelled:FILE#split, it is 67.2 % of 1,884 test sentences and 66.1 % of
1,777 for validation (AMD EPYC, family 25, model 17; one of its 2 cores, 1:09 minutes).
"""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 2000
    return to_config_dict(
        Experiment(
            name='classify',
            model=ModelConfig(
                kind='encoder', vocab_size=vocab_size, d_model=64, d_ff=128, num_layers=2, num_heads=4, position='rope',
                norm_position='pre', ffn='gelu', embedding_scale='none', tie_embeddings='none', head='classes',
                num_classes=3, pooling='mean', dropout=0.3, layer_stack='unrolled', dtype='bfloat16',
            ),
            data=DataConfig(
                objective='classification', train='sotu_era', vocab_size=vocab_size, source_length=64,
                batch_tokens=4096, batching='bucket',
            ),
            optimizer=OptimizerConfig(
                name='adamw', learning_rate=1e-3, schedule='cosine', warmup_steps=50, weight_decay=0.1, clip_norm=1.0,
            ),
            training=TrainingConfig(
                steps=400, log_every=20, evaluate_every=20, checkpoint_every=20, label_smoothing=0.1,
                best_metric='accuracy',
            ),
        )
    )  # fmt: skip
