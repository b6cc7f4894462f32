r"""What the data does with keys and values: second moments of tokens and of the loss's gradients.

To second order, the KL divergence from what a model gives to what it gives with other keys and values is
½ Σ_s tr(F_s δ_s δ_sᵀ), s over tokens, if errors δ_s of different tokens are taken as uncorrelated; F_s is the
Fisher information of the outputs about [key; value] of token s: the second moment of the gradient of
log p(y), y drawn from the model itself. With δ_s = (W − W') x_s, and F and x taken as uncorrelated, it is

    KL ≈ ½ tr(G (W − W') A (W − W')ᵀ)  nats a token,   A = mean x xᵀ,   G = mean g gᵀ

(the Kronecker factors of K-FAC, arXiv 1503.05671). G holds what one would whiten by hand: by the chain rule
g of a key is Σ_t a_ts q_t over the queries that read it, g of a value Σ_t p_ts Oᵀ e_t, through the output
projection. It weighs keys, values, heads and layers in one unit.

Among all W' of rank r the least is reached by [G^½ W A^½]_r between G^−½ and A^−½ (Eckart and Young), and is
½ Σ_{i>r} σ_i². Each layer's σ_i²/2 are nats, so that one budget over layers is spent on the largest of all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.forward import device_of, run_model, to_device
from rankwise.compression.kv_modules import LatentLayer, channels_of
from rankwise.compression.output_price import real_tokens
from rankwise.errors import CompressionError
from rankwise.tracing import record_calls
from rankwise.tracing.projections import linear_parts

RIDGE = 1e-9
"""Added to second moments of tokens, relative to their mean eigenvalue: what was never seen stays finite."""
GRADIENT_RIDGE = 1e-6
"""Likewise, of gradients, which are noisier: each is one draw."""


@dataclass
class Moments:
    """Of one attention layer."""

    tokens: Float64[Tensor, "D D"]
    """A: mean of x xᵀ."""
    gradients: Float64[Tensor, "N N"]
    """G: mean of g gᵀ, of keys and then values as the linear layers give them."""
    weight: Float64[Tensor, "N D"]
    """W: rows of keys and then of values."""
    count: int = 0
    """Tokens."""


@dataclass(frozen=True)
class Spectrum:
    """The singular directions of a layer's weighted map."""

    left: Float64[Tensor, "N m"]
    """G^−½ U Σ."""
    right: Float64[Tensor, "m D"]
    """Vᵀ A^−½."""
    nats: Float64[Tensor, "m"]
    """σ²/2, descending: nats a token that each direction is worth."""

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """W' = up · down of a rank; the rows of ``down`` are orthonormal, so that no number grows large.

        Args:
            rank: r.

        Returns:
            down (r, D) and up (N, r).
        """
        basis, triangle = torch.linalg.qr(self.right[:rank].mT)
        return basis.mT, self.left[:, :rank] @ triangle.mT


def spectrum(
    weight: Float64[Tensor, "N D"],
    tokens: Float64[Tensor, "D D"] | None = None,
    gradients: Float64[Tensor, "N N"] | None = None,
) -> Spectrum:
    """Directions of [G^½ W A^½]; without a metric, that side is not weighted.

    Args:
        weight: W.
        tokens: A.
        gradients: G.
    """
    root_a, inverse_a = _roots(tokens, weight.shape[1], RIDGE)
    root_g, inverse_g = _roots(gradients, weight.shape[0], GRADIENT_RIDGE)
    left, values, right = torch.linalg.svd(root_g @ weight @ root_a, full_matrices=False)
    return Spectrum(inverse_g @ (left * values), right @ inverse_a, values.square() / 2)


def _roots(moments: Tensor | None, size: int, ridge: float) -> tuple[Tensor, Tensor]:
    eye = torch.eye(size, dtype=torch.float64)
    if moments is None:
        return eye, eye
    least = ridge * moments.trace().clamp(min=1e-300) / size
    values, vectors = torch.linalg.eigh(moments + least * eye)
    roots = values.clamp(min=least).sqrt()
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT


def layer_moments(
    model: nn.Module, layers: list[LatentLayer], batches: list[Any], seed: int, on_step: Any
) -> list[Moments]:
    """Second moments of all layers, one draw of the next token at each position.

    Cost: a forward and a backward pass for each batch; (D² + N²) numbers a layer stay.

    Args:
        model: gives ``logits``; in evaluation mode.
        layers: which.
        batches: what the model takes.
        seed: of the draws.
        on_step: told what is under way.

    Raises:
        CompressionError: if the model gives no logits, or a gradient is not finite.
    """
    moments = [_empty(model, layer) for layer in layers]
    device = device_of(model)
    generator = torch.Generator(device).manual_seed(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        for count, batch in enumerate(batches, start=1):
            on_step(f"gradients of batch {count}")
            _add_batch(model, layers, moments, to_device(batch, device), generator)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    for layer, moment in zip(layers, moments, strict=True):
        moment.tokens /= max(moment.count, 1)
        moment.gradients /= max(moment.count, 1)
        if not bool(moment.tokens.isfinite().all() and moment.gradients.isfinite().all()):
            raise CompressionError(
                f"attention layer {layer.module!r}",
                expected="finite tokens and gradients",
                got="NaN or infinity",
                fix="Mend the weights, or use float32: `rankwise audit` shows where it begins.",
            )
    return moments


def _empty(model: nn.Module, layer: LatentLayer) -> Moments:
    weight = layer_weight(model, layer)
    return Moments(
        torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64),
        torch.zeros(weight.shape[0], weight.shape[0], dtype=torch.float64),
        weight,
    )


def layer_weight(model: nn.Module, layer: LatentLayer) -> Float64[Tensor, "N D"]:
    """W: rows of keys and then of values.

    Args:
        model: not compressed yet.
        layer: which.
    """
    rows = []
    for name, runs in ((layer.key, layer.key_channels), (layer.value, layer.value_channels)):
        parts = linear_parts(model.get_submodule(layer.path(name)))
        assert parts is not None
        rows.append(parts[0].detach()[channels_of(runs)])
    return torch.cat(rows).double().cpu()


def _add_batch(
    model: nn.Module,
    layers: list[LatentLayer],
    moments: list[Moments],
    batch: Any,
    generator: torch.Generator,
) -> None:
    names = {layer.path(name) for layer in layers for name in (layer.key, layer.value)}
    recording = record_calls(model, names, detach=False)
    with _differentiable(model, names), recording as calls, torch.enable_grad():
        logits = getattr(run_model(model, batch), "logits", None)
        if logits is None or logits.dim() != 3:
            raise CompressionError(
                f"model {type(model).__name__}",
                expected="logits (B, T, V), whose divergence says what keys and values are worth",
                got="none" if logits is None else f"logits of shape {tuple(logits.shape)}",
                fix="Load it with its language-modelling head: AutoModelForCausalLM.",
            )
        real = real_tokens(batch, logits)
        chances = logits.detach()[real].float().softmax(-1)
        if not bool(chances.isfinite().all()):
            raise CompressionError(
                f"model {type(model).__name__}", expected="finite logits", got="NaN or infinity",
                fix="Mend the weights, or use float32: `rankwise audit` shows where it begins.",
            )  # fmt: skip
        drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
        loss = F.cross_entropy(logits[real].float(), drawn, reduction="sum")
        outputs = {call.name: call.output for call in calls}
        found = torch.autograd.grad(loss, list(outputs.values()))
        gradients = dict(zip(outputs, found, strict=True))
    inputs = {call.name: call.args[0].detach() for call in calls}
    for layer, moment in zip(layers, moments, strict=True):
        key, value = layer.path(layer.key), layer.path(layer.value)
        rows = inputs[key].reshape(real.numel(), -1)[real.flatten()].double()
        sides = ((key, layer.key_channels), (value, layer.value_channels))
        pieces = [gradients[name].reshape(real.numel(), -1)[:, channels_of(runs)] for name, runs in sides]
        slopes = torch.cat(pieces, -1)[real.flatten()].double()
        moment.tokens += (rows.mT @ rows).cpu()
        moment.gradients += (slopes.mT @ slopes).cpu()
        moment.count += rows.shape[0]


@contextmanager
def _differentiable(model: nn.Module, names: set[str]) -> Iterator[None]:
    """Make outputs of linear layers take part in differentiation though no parameter does."""

    def after(_module: nn.Module, _args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out if out.requires_grad else out.detach().requires_grad_()

    handles = [model.get_submodule(name).register_forward_hook(after) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
