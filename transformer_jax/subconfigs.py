"""Groups of choices which belong together and which most architectures do without."""

from __future__ import annotations

import dataclasses

from transformer_jax.errors import UserError, choose


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length; the equations stand in `ops.rope`.

    Attributes:
      kind: 'linear', 'ntk', 'dynamic', 'yarn' or 'llama3'.
      factor: how many times longer than the trained length.
      original_positions: the trained length (dynamic, yarn, llama3).
      beta_fast, beta_slow: turns between which YaRN's ramp runs.
      attention_factor: YaRN's final magnitude of cos and sin; None derives it from the factor.
      mscale, mscale_all_dim: DeepSeek's ratio form of the same.
      low_frequency_factor, high_frequency_factor: llama3's borders of the ramp, in wavelengths per trained length.
      truncate: whether YaRN's ramp ends on whole dimensions, as in the released code.
    """

    kind: str
    factor: float = 1.0
    original_positions: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    truncate: bool = True

    def __post_init__(self):
        choose('rope_scaling.kind', self.kind, ('linear', 'ntk', 'dynamic', 'yarn', 'llama3'))
        if self.kind in ('dynamic', 'yarn', 'llama3') and self.original_positions is None:
            raise UserError(f"rope_scaling.kind = '{self.kind}' needs original_positions, the trained length")


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """A mixture of experts in place of the feed-forward layer; the equations stand in `ops.routing`.

    Attributes:
      num_experts: E; experts_per_token: k, how many of them a token goes to.
      d_ff: width of an expert (None: that of the model).
      shared_experts: so many more see every token, computed as one of that many times the width.
      affinity: 'softmax' over the experts, or 'sigmoid' of each.
      normalize: whether the weights of a token's k experts sum to 1, before the factor `scale`.
      correction_bias: a bias per expert which helps to pick and does not weigh (DeepSeek-V3).
      groups, groups_per_token: experts are picked from the best groups only; group_score: what a group is worth, its
        'max' (DeepSeek-V2) or the sum of its two best, 'top_two' (DeepSeek-V3).
      dispatch: 'dropless', or 'capacity': an expert takes ceil(capacity_factor k tokens / E) and no more, and what is
        dropped adds nothing.
      balance_loss, z_loss: coefficients of the auxiliary losses in `out.aux`.
      dense_layers: so many first layers keep a dense feed-forward layer.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    d_ff: int | None = None
    shared_experts: int = 0
    affinity: str = 'softmax'
    normalize: bool = True
    scale: float = 1.0
    correction_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    group_score: str = 'max'
    dispatch: str = 'dropless'
    capacity_factor: float = 1.25
    balance_loss: float = 0.0
    z_loss: float = 0.0
    dense_layers: int = 0

    def __post_init__(self):
        choose('mixture.affinity', self.affinity, ('softmax', 'sigmoid'))
        choose('mixture.group_score', self.group_score, ('max', 'top_two'))
        choose('mixture.dispatch', self.dispatch, ('dropless', 'capacity'))
        E, groups = self.num_experts, self.groups
        if not 1 <= groups <= E or E % groups or not 1 <= self.groups_per_token <= groups:
            raise UserError(
                f'mixture.groups = {groups} and mixture.groups_per_token = {self.groups_per_token}; the groups must '
                f'divide num_experts = {E}, and a token can have at most all of them'
            )
        if self.group_score == 'top_two' and groups > 1 and E // groups < 2:
            raise UserError(f"mixture.group_score = 'top_two' needs two experts in each of the {groups} groups")
        reachable = E // groups * self.groups_per_token
        if not 1 <= self.experts_per_token <= reachable:
            raise UserError(
                f'mixture.experts_per_token = {self.experts_per_token}; it must be 1 to {reachable}, the number of '
                f'experts which a token can reach'
            )
        if self.capacity_factor <= 0:
            raise UserError(f'mixture.capacity_factor = {self.capacity_factor}; it must be above 0')


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention; the equations stand in `layers.latent_attention`.

    Attributes:
      kv_rank: R, width of the latent which keys and values are made of.
      query_rank: width of that of queries (None: queries are made of x).
      rotary_dim: P, features of a query or key head which are rotated; the other d_k - P know no position.
      form: 'plain', 'absorbed', or 'auto', whichever needs fewer products.
    """

    kv_rank: int = 512
    query_rank: int | None = None
    rotary_dim: int = 64
    form: str = 'auto'

    def __post_init__(self):
        choose('latent.form', self.form, ('auto', 'plain', 'absorbed'))


@dataclasses.dataclass(frozen=True)
class PatchConfig:
    """How an image becomes tokens (Dosovitskiy et al. 2021, section 3.1).

    Attributes:
      image_size: (height, width) in pixels; patch_size: of the squares or rectangles it is cut into.
      channels: numbers per pixel.
      class_token: a learned token before the patches.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    channels: int = 3
    class_token: bool = True

    def __post_init__(self):
        for name in ('image_size', 'patch_size'):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for side, image, patch in zip(('height', 'width'), self.image_size, self.patch_size, strict=True):
            if patch < 1 or image % patch or image < patch:
                raise UserError(f'patches.patch_size = {self.patch_size}: {patch} does not divide the {side} {image}')

    @property
    def tokens(self) -> int:
        """Patches of an image, and the class token."""
        (height, width), (p, q) = self.image_size, self.patch_size
        return height // p * (width // q) + self.class_token
