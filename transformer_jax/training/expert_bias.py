"""Correction biases of a mixture of experts, moved by load and by no gradient.

Each step adds rate sign(mean c - c_i) to the bias of expert i, which c_i choices of the whole batch went to
(`ops.routing.bias_step`; Wang et al. 2024; DeepSeek-V3, 2024, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from transformer_jax.config import ModelConfig
from transformer_jax.models import scan_params
from transformer_jax.ops.routing import bias_step


def by_parameter(choices: Mapping[str, tuple[jax.Array | None, ...]], config: ModelConfig) -> dict[str, Any]:
    """Returns `ModelOutput.expert_choices` as a tree in which each stands where its bias stands in the parameters."""
    tree = {
        stack: {
            f'layers_{i}': {} if chosen is None else {'ffn': {'router': {'bias': chosen}}}
            for i, chosen in enumerate(layers)
        }
        for stack, layers in choices.items()
    }
    return scan_params(tree, config) if config.layer_stack == 'scan' else tree


def balanced(updates: Any, chosen: Any, rate: float) -> Any:
    """Returns updates of the parameters in which those of biases that have choices in `chosen` are their step."""
    if not isinstance(chosen, Mapping):
        return bias_step(chosen, rate).astype(updates.dtype)
    return updates | {name: balanced(updates[name], part, rate) for name, part in chosen.items() if part is not None}
