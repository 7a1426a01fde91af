"""The vision encoder: a stack over the patches of an image."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.layers.embedding import Embedder
from transformer_jax.layers.head import Classifier, HeadLayer, pool
from transformer_jax.layers.patches import Patches
from transformer_jax.models.output import ModelOutput
from transformer_jax.models.stack import Stack, StackInputs, choices, total_losses
from transformer_jax.ops.masks import Mask


class VisionEncoder(nn.Module):
    """logits = head(pool(encoder(patches + positions))) (Dosovitskiy et al. 2021, section 3.1).

    Pooling is the class token ('first') or the mean of all tokens.
    """

    config: ModelConfig

    def setup(self):
        config = self.config
        self.patches = Patches(config)
        self.embedder = Embedder(config)
        self.encoder = Stack(config, 'encoder')
        if config.head_activation != 'none':
            self.head_layer = HeadLayer(config)
        if config.head == 'classes':
            self.head = Classifier(config)

    def __call__(
        self,
        images: jax.Array,
        *,
        deterministic: bool = True,
        return_hiddens: bool = False,
        return_attentions: bool = False,
    ) -> ModelOutput:
        """Runs the model.

        Args:
          images: (B, height, width, channels), of the config's size, scaled as in training (ViT's: -1 to 1).
          deterministic: False turns dropout on, with `rngs={'dropout': key}`.

        Raises:
          UserError: for images of another size or number of channels.
        """
        config = self.config
        expected = (*config.patches.image_size, config.patches.channels)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise UserError(f'images have shape {images.shape}; this model reads (batch, height, width, channels) = '
                            f'(batch, {", ".join(map(str, expected))})')  # fmt: skip
        x = self.patches(images)
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        x = embedded = self.embedder(x, positions, None, deterministic)
        inputs = StackInputs(positions, Mask())
        x, outputs = self.encoder(x, inputs, None, deterministic, return_hiddens, return_attentions)
        fields = {'hidden': x, 'aux': total_losses(outputs)}
        if config.mixture is not None:
            fields['expert_choices'] = {'encoder': choices(outputs)}
        if return_hiddens:
            fields['hiddens'] = (embedded, *(output.hidden_BTD for output in outputs[:-1]), x)
        if return_attentions:
            fields['attentions'] = tuple(output.attention_BNTS for output in outputs)
        if config.pooling != 'none':
            pooled = pool(x, None, config.pooling)
            fields['pooled'] = pooled if config.head_activation == 'none' else self.head_layer(pooled)
        if config.head == 'classes':
            fields['logits'] = self.head(fields['pooled'], deterministic)
        return ModelOutput(**fields)
