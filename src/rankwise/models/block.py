"""Transformer block: token mixer and feed-forward part, each with a norm, a scale and a skip connection."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from rankwise.models.configuration import ToSTConfig
from rankwise.models.mixers import MixerState, build_mixer
from rankwise.skips.lambda_skip import LambdaSkip


def make_norm(config: ToSTConfig) -> nn.Module:
    """Return the norm layer that ``config.norm`` selects: LayerNorm, RMSNorm or the identity."""
    if config.norm == "none":
        return nn.Identity()
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.use_bias)


class LayerScale(nn.Module):
    """Learned factor per channel, by which the output of a mixer or feed-forward part is multiplied.

    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Section 2.
    """

    def __init__(self, hidden_size: int, init: float) -> None:
        super().__init__()
        self.init = float(init)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all factors to their initial value."""
        nn.init.constant_(self.weight, self.init)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Return x multiplied by the factors."""
        return x * self.weight

    def extra_repr(self) -> str:
        """Return the initial value as text, for printing the module."""
        return f"init={self.init:g}"


def make_scale(hidden_size: int, init: float | None) -> nn.Module:
    """Return a `LayerScale`, or the identity if ``init`` is None."""
    return nn.Identity() if init is None else LayerScale(hidden_size, init)


class FeedForward(nn.Module):
    """Feed-forward part: ``dropout(out_proj(act(in_proj(x))))`` for each token."""

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        self.in_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.act = ACT2FN[config.hidden_act]
        self.out_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Return the output of the feed-forward part, which the block adds to its input."""
        return self.dropout(self.out_proj(self.act(self.in_proj(x))))


class Block(GradientCheckpointingLayer):
    """Residual block: a mixer with a λ-skip (skip connection scaled by λ), and an optional feed-forward part.

    Pre-norm: ``y = λ x + γ₁ g(u) mixer(u)`` with ``u = norm(x)``; ``z = y + γ₂ mlp(norm(y))``.
    Post-norm: ``y = norm(λ x + γ₁ g(x) mixer(x))``; ``z = norm(y + γ₂ mlp(y))``.
    The gate g is SiLU of a linear map, or 1 without a gate. γ₁ and γ₂ are `LayerScale` factors, or 1.
    """

    def __init__(self, config: ToSTConfig, layer: int) -> None:
        super().__init__()
        self.post_norm = config.norm_position == "post"
        self.mixer_norm = make_norm(config)
        self.mixer = build_mixer(config, layer)
        size = config.hidden_size
        self.gate = nn.Linear(size, size, bias=config.use_bias) if config.gate else None
        self.mixer_scale = make_scale(size, config.layer_scale)
        self.skip = LambdaSkip(size, config.skip, config.skip_init)
        self.mlp: FeedForward | None = None
        if config.intermediate_size:
            self.mlp_norm = make_norm(config)
            self.mlp = FeedForward(config)
            self.mlp_scale = make_scale(size, config.layer_scale)
        for sublayer in (self.mixer, self.mlp):
            last = getattr(sublayer, "out_proj", None)
            if isinstance(last, nn.Linear):
                # The last layer of each part gets smaller initial weights. It is marked, because
                # `_init_weights` sees only single modules.
                last.ends_branch = True  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], MixerState | None]:
        """Return the new token states and the mixer's decoding state; arguments as in `Mixer.forward`."""
        x = hidden_states
        mixer_input = x if self.post_norm else self.mixer_norm(x)
        mixed, state = self.mixer(mixer_input, attention_mask, state, return_state=return_state)
        if self.gate is not None:
            mixed = nn.functional.silu(self.gate(mixer_input)) * mixed
        x = self.skip(x, self.mixer_scale(mixed))
        if self.post_norm:
            x = self.mixer_norm(x)
        if self.mlp is None:
            return x, state
        if self.post_norm:
            return self.mlp_norm(x + self.mlp_scale(self.mlp(x))), state
        return x + self.mlp_scale(self.mlp(self.mlp_norm(x))), state
