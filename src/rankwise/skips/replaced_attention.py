"""The module that stands where softmax attention stood, and what it keeps in a cache."""

import inspect
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from rankwise.errors import ReplacementError

MASKED = -1e4
"""A mask that is added to scores hides what is lower: float16 cannot go below −65,504."""


class ReplacedAttention(nn.Module):
    """A mixer with the signature of the attention layer in whose place it stands.

    The attention layer is kept, out of sight of `parameters` and `state_dict`.

    Args:
        attention: the layer that it replaces; its ``forward`` has an argument ``hidden_states``.
        mixer: a `rankwise.models.mixers.Mixer`.
        note: what was replaced, a `Replacement`.
        results: how many things the layer gives back; 0: a tensor that is not in a tuple.
    """

    def __init__(self, attention: nn.Module, mixer: Any, note: Any, results: int) -> None:
        super().__init__()
        self.mixer, self.note, self.results = mixer, note, results
        self.layer_idx = getattr(attention, "layer_idx", None)
        self._kept = (attention,)  # in a tuple it is no submodule
        self._signature = inspect.signature(attention.forward)

    @property
    def attention(self) -> nn.Module:
        """The layer that was replaced, as it was."""
        return self._kept[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Mix the tokens; takes what the attention layer takes, gives its output, and None for the rest."""
        given = self._signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        tokens = given["hidden_states"]
        mask = real_tokens_of(given.get("attention_mask"), tokens)
        cache = given.get("past_key_values")
        if cache is None:
            output = self.mixer(tokens, mask).output
        else:
            kept = state_in(cache, self.layer_idx, type(self.attention).__name__)
            output, kept.state = self.mixer(tokens, mask, kept.state, return_state=True)
            kept.count(tokens)
        return output if not self.results else (output, *[None] * (self.results - 1))


def real_tokens_of(mask: Any, tokens: Float[Tensor, "B T D"]) -> Bool[Tensor, "B T"] | None:
    """Which tokens of a call are real, out of the mask that attention gets.

    A row of the mask of token pairs says what a token sees: a real token sees itself, under causal masks and
    windows too, and nothing sees padding.

    Args:
        mask: of tokens (B, S), or of pairs of them (B, 1, T, S), as booleans or to be added; or None.
        tokens: of this call, the last T of S.

    Raises:
        ReplacementError: if it is neither.

    Examples:
        >>> import torch
        >>> causal = torch.ones(1, 1, 3, 3).tril().bool() & torch.tensor([False, True, True])
        >>> real_tokens_of(causal, torch.zeros(1, 3, 2)).tolist()
        [[False, True, True]]
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise ReplacementError(
            "the attention mask of a replaced layer",
            expected="one of tokens (B, S), or of pairs (B, 1, T, S)",
            got=type(mask).__name__ if not isinstance(mask, Tensor) else f"shape {tuple(mask.shape)}",
            fix='Load the model with attn_implementation="sdpa" or "eager".',
        )
    count = tokens.shape[1]
    if mask.dim() == 4:
        mask = mask[:, 0, -count:, -count:].diagonal(dim1=-2, dim2=-1)
        mask = mask > MASKED if mask.is_floating_point() else mask.bool()
    return mask[:, -count:].bool().expand(tokens.shape[:2])


def state_in(cache: Any, layer: int | None, name: str) -> Any:
    """The place of a layer in a dynamic cache of transformers, made to hold a mixer's state.

    Args:
        cache: the cache.
        layer: which.
        name: of the attention class, for errors.

    Raises:
        ReplacementError: if the cache is of another kind, or holds keys of the layer.
    """
    from transformers.cache_utils import DynamicLayer

    from rankwise.skips.mixer_state import StateLayer

    layers = getattr(cache, "layers", None)
    if layers is not None and isinstance(layer, int):
        grows = getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
        if grows:
            layers.extend(DynamicLayer() for _ in range(layer + 1 - len(layers)))
        if layer < len(layers):
            kept = layers[layer]
            if isinstance(kept, DynamicLayer) and not kept.is_initialized:
                kept = layers[layer] = StateLayer()
            if isinstance(kept, StateLayer):
                return kept
    raise ReplacementError(
        f"the cache of a replaced {name}",
        expected="a DynamicCache that this model has filled",
        got=type(cache).__name__,
        fix="Start with an empty DynamicCache, or pass use_cache=False.",
    )


def moved_like(module: nn.Module, like: nn.Module) -> nn.Module:
    """A module on the device and in the dtype of another one, which may have moved since.

    Args:
        module: the module.
        like: the other.
    """
    of = next((parameter for parameter in like.parameters() if parameter.is_floating_point()), None)
    return module if of is None else module.to(of)


def none_of(values: Any) -> bool:
    """Whether all of a layer's further results are None or its attention weights, which nothing reads.

    Args:
        values: what it gave after its output.
    """
    return all(value is None or (isinstance(value, Tensor) and value.dim() == 4) for value in values)
