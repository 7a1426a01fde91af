"""Classification of images (Dosovitskiy et al. 2021, section 3.1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from transformer_jax import errors
from transformer_jax.config import ModelConfig
from transformer_jax.data import config as data_config
from transformer_jax.data import planner, sources, tokenizers
from transformer_jax.data.objectives import base, classification


@dataclasses.dataclass(frozen=True)
class ImageExamples(classification.LabelledExamples):
    """Images (n, height, width, channels) float32, and whether they are augmented, as those of training are."""

    images: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.float32))
    augmented: bool = False

    @property
    def lengths(self) -> np.ndarray:
        """Slots of each example, (n, 1): one, since all images have the same size."""
        return np.ones((len(self.ids), 1), np.int64)


class ImageClassification(classification.Classes):
    """A class for each image. Batches hold images (B, height, width, channels) float32, zeros in padding rows.

    Augmentation is drawn from (seed, epoch, image): new every epoch, the same on every host, none in evaluation.

    Raises:
      UserError: as `Classes`, and for images of another size than the model reads, or of several sizes.
    """

    name, kind = 'image_classification', 'vision'

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer | None,
        config: data_config.DataConfig,
        model: ModelConfig | None = None,
    ):
        super().__init__(tokenizer, config, model)
        self._patches = None if model is None else model.patches

    def encode(self, source: sources.Source, training: bool) -> ImageExamples:
        images, labels = [], []
        for start, examples in base.chunks(source, ('label', 'image')):
            images += [example['image'] for example in examples]
            labels += [
                self.check(example['label'], source.name, number) for number, example in enumerate(examples, start)
            ]
        shapes = {image.shape for image in images}
        if self._patches is not None:
            expected = (*self._patches.image_size, self._patches.channels)
            if shapes != {expected}:
                raise errors.UserError(
                    f"'{source.name}' has images of {_shown(shapes)}; model.patches reads {_shown([expected])} "
                    '(height x width x channels)'
                )
        return ImageExamples(
            (), np.arange(len(images)), len(images), labels=np.array(labels, np.int32), images=np.stack(images),
            augmented=training and self._config.augmentation != 'none',
        )  # fmt: skip

    def batch(self, examples: ImageExamples, plan: planner.Batch, packed: bool, seed: int) -> dict[str, Any]:
        images = np.zeros((len(plan.offsets) - 1, *examples.images.shape[1:]), np.float32)
        filled = np.flatnonzero(np.diff(plan.offsets))
        images[filled] = examples.images[plan.examples]
        if examples.augmented:
            most = self._config.shift_pixels
            for row, (_, random) in zip(filled, base.generators(plan, seed), strict=True):
                images[row] = shift(images[row], *random.integers(-most, most + 1, 2))
        return self.placed({'images': images}, examples, plan)


def shift(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """Returns an image (height, width, channels) moved by whole pixels; what comes into sight repeats its edge."""
    rows, columns = (
        np.clip(np.arange(size) - by, 0, size - 1) for size, by in zip(image.shape[:2], (down, right), strict=True)
    )
    return image[rows[:, None], columns]


def _shown(shapes) -> str:
    return ', '.join(sorted('x'.join(map(str, shape)) for shape in shapes))
