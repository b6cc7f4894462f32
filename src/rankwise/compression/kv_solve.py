r"""The part ``kv``: low-rank keys and values of least output KL, and one budget of cache bytes.

To second order, keys and values W'x in place of Wx change the outputs by a KL divergence of

    KL ≈ ½ tr(G (W − W') A (W − W')ᵀ) nats per token,   A = mean ‖g‖² x xᵀ/s,   G = mean ‖x‖² g gᵀ/s

with g the gradient of log p(y) at [key; value] of a token, y drawn from the model itself, and
s² = mean ‖x‖²‖g‖². Without the norms these are the Kronecker factors of K-FAC (arXiv 1503.05671), in which a
token counts by its share of the window. All later queries read the first token, so its ‖g‖² grows with the
window as its share falls: with the norms, its weight does not depend on the length of windows
(docs/evidence/compress-cache.md has the derivation and its assumptions).
Among all W' of rank r, G^−½ [G^½ W A^½]_r A^−½ has the least KL, ½ Σ_{i>r} σ_i² (Eckart and Young), where
[·]_r keeps the r largest singular values σ. The σ_i²/2 of all layers are in nats, so one budget over layers
goes to the largest of them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from rankwise._internals.batches import real_tokens, to_device
from rankwise._internals.forward import AddedHook, Change, Progress, device_of
from rankwise._internals.linalg import as_float64, roots_of
from rankwise.compression.evaluate import cache_bytes, cached_layers, reference_tokens
from rankwise.compression.kv_find import layer_weight
from rankwise.compression.kv_modules import LatentLayer, latent_change
from rankwise.compression.records import LatentRank
from rankwise.compression.trials import Job, Solution, check_tokens
from rankwise.errors import CompressionError
from rankwise.importance.loss_choice import choose_loss
from rankwise.importance.losses import Loss, LossBatch, token_logits
from rankwise.importance.output_head import first_pass
from rankwise.importance.settings import ImportanceSettings
from rankwise.tracing import record_calls

RIDGE = 1e-9
"""Added to A, relative to its mean eigenvalue, so that directions without data stay finite."""
GRADIENT_RIDGE = 1e-6
"""Added to G, relative to its mean eigenvalue. G is noisier than A, because one label is drawn per token."""


def solve(job: Job) -> Solution:
    """Return the change to keys and values from one latent per layer.

    The ranks of all layers share one target: a share of the cache's bytes, or a tolerance.
    """
    layers, skipped = job.found
    room = check(job)
    if "spectra" not in job.reused:
        moments = collect_moments(job.model, layers, job.batches, job.seed, job.on_progress)
        check_tokens(moments[0].count, max(layer.rank for layer in layers))
        svds: list[WeightedSVD] = []
        for layer, moment in zip(layers, moments, strict=True):
            job.on_progress(f"factoring keys and values of {layer.module}", len(svds) / len(layers))
            svds.append(weighted_svd(moment.weight, moment.tokens, moment.gradients))
        job.reused["spectra"] = svds
    spectra: list[WeightedSVD] = job.reused["spectra"]
    nats = [spectrum.nats for spectrum in spectra]
    if room is not None:
        ranks = largest_ranks(nats, room)
    else:
        assert job.tolerance is not None, "`compress` gives a share or a tolerance"
        ranks = ranks_for_tolerance(nats, job.tolerance)
    changed = layers if any(rank < layer.full for layer, rank in zip(layers, ranks, strict=True)) else []
    factors = [spectrum.factors(rank) for spectrum, rank in zip(spectra, ranks, strict=True)][: len(changed)]
    return Solution(
        latent_change(job.model, changed, factors),
        latents=[
            LatentRank(
                part="kv",
                site=layer.module,
                layer=int(job.model.get_submodule(layer.module).layer_idx),  # type: ignore[arg-type]
                channels=layer.full,
                full_rank=layer.rank,
                rank=rank,
                output_kl=float(values[rank:].sum()),
            )
            for layer, values, rank in zip(layers, nats, ranks, strict=True)
        ],
        skipped=skipped,
    )


# --- second moments --------------------------------------------------------------------------------------


@dataclass
class SecondMoments:
    """Second moments A of the tokens and G of the gradients of one attention layer, with its weight W."""

    tokens: Float64[Tensor, "D D"]
    gradients: Float64[Tensor, "N N"]
    """Channels of keys come before channels of values, in the order of the linear layers' outputs."""
    weight: Float64[Tensor, "N D"]
    sizes: float = 0.0
    """Σ ‖x‖²‖g‖²."""
    count: int = 0
    """Number of tokens."""

    def add(self, x: Float64[Tensor, "T D"], g: Float64[Tensor, "T N"]) -> None:
        """Add tokens and their gradients."""
        size_x, size_g = (values.square().sum(1, keepdim=True) for values in (x, g))
        self.tokens += ((size_g * x).mT @ x).cpu()
        self.gradients += ((size_x * g).mT @ g).cpu()
        self.sizes += float((size_x * size_g).sum())
        self.count += x.shape[0]

    def finish(self) -> None:
        """Turn sums into means: tr A · tr G becomes the mean of ‖x‖²‖g‖²."""
        scale = math.sqrt(max(self.sizes * self.count, 1e-300))
        self.tokens, self.gradients = self.tokens / scale, self.gradients / scale


def collect_moments(
    model: nn.Module, layers: list[LatentLayer], batches: list[Any], seed: int, on_progress: Progress
) -> list[SecondMoments]:
    """Return the second moments of all layers, from one forward and one backward pass per batch."""
    moments = []
    for weight in (layer_weight(model, layer) for layer in layers):
        g, x = (torch.zeros(size, size, dtype=torch.float64) for size in weight.shape)
        moments.append(SecondMoments(x, g, weight))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        settings = ImportanceSettings(loss="output")
        loss, prepared = choose_loss(model, batches, first_pass(model, batches[0]), settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        for count, batch in enumerate(prepared):
            on_progress(f"gradients of batch {count + 1} of {len(batches)}", count / len(batches))
            _add_batch(model, layers, moments, loss, batch, generator)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    for moment in moments:
        moment.finish()
    return moments


def _add_batch(
    model: nn.Module,
    layers: list[LatentLayer],
    moments: list[SecondMoments],
    loss: Loss,
    batch: LossBatch,
    generator: torch.Generator,
) -> None:
    names = {name for layer in layers for name, _ in layer.projections}
    hooks = [AddedHook(name, "after", _differentiable) for name in names]
    recording = record_calls(model, names, detach=False)
    with Change(model, hooks=hooks), recording as calls, torch.enable_grad():
        output = loss.run(model, batch)
        real = real_tokens(batch.batch, token_logits(output).states.shape[:2])
        outputs = {call.name: call.output for call in calls}
        drawn = loss.probe(output, batch, generator).sum()  # cross-entropy of labels from the predictions
        gradients = dict(zip(outputs, torch.autograd.grad(drawn, list(outputs.values())), strict=True))
    inputs = {call.name: call.args[0].detach() for call in calls}
    for layer, moment in zip(layers, moments, strict=True):
        x = inputs[layer.projections[0][0]].reshape(real.numel(), -1)[real.flatten()]
        pieces = [gradients[name].reshape(real.numel(), -1)[:, rows] for name, rows in layer.projections]
        g = torch.cat(pieces, -1)[real.flatten()]
        moment.add(as_float64(x), as_float64(g))


def _differentiable(_module: nn.Module, _args: Any, _kwargs: Any, output: Tensor) -> Tensor:
    """Hook that makes the output of a linear layer require a gradient, because all parameters are frozen."""
    return output if output.requires_grad else output.detach().requires_grad_()


# --- factors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightedSVD:
    """Singular directions of G^½ W A^½, mapped back to W, and the KL that each direction saves."""

    left: Float64[Tensor, "N m"]
    """G^−½ U Σ."""
    right: Float64[Tensor, "m D"]
    """Vᵀ A^−½."""
    nats: Float64[Tensor, "m"]
    """σ²/2, descending: output KL per token without this direction."""

    def factors(self, rank: int) -> tuple[Float64[Tensor, "r D"], Float64[Tensor, "N r"]]:
        """Return the factors `down` and `up` of a rank. Orthonormal rows of `down` keep all numbers small."""
        basis, triangle = torch.linalg.qr(self.right[:rank].mT)
        return basis.mT, self.left[:, :rank] @ triangle.mT


def weighted_svd(
    weight: Float64[Tensor, "N D"],
    inputs: Float64[Tensor, "D D"] | None = None,
    gradients: Float64[Tensor, "N N"] | None = None,
) -> WeightedSVD:
    """Return the SVD of G^½ W A^½. A is the identity without `inputs`, G without `gradients`."""
    identities = [torch.eye(size, dtype=torch.float64) for size in weight.shape]
    root_g, inverse_g = roots_of(identities[0] if gradients is None else gradients, GRADIENT_RIDGE)
    root_a, inverse_a = roots_of(identities[1] if inputs is None else inputs, RIDGE)
    left, values, right = torch.linalg.svd(root_g @ weight @ root_a, full_matrices=False)
    return WeightedSVD(inverse_g @ (left * values), right @ inverse_a, values.square() / 2)


# --- ranks -----------------------------------------------------------------------------------------------


def check(job: Job) -> int | None:
    """Return how many numbers per token all latents may have for a share to keep; None for a tolerance.

    The share refers to the cache of one sequence of `reference_tokens`. Other layers, such as windows, and
    stored token positions count as bytes of the cache. Raise `CompressionError` if rank 1 needs more.
    """
    if job.keep is None:
        return None
    layers, tokens = job.found[0], reference_tokens(job.model)
    cache = cached_layers(job.model, to_device(job.batches[0], device_of(job.model)))
    whole = cache_bytes(cache, tokens)
    modules: list[Any] = [job.model.get_submodule(layer.module) for layer in layers]
    own = sum(cache[module.layer_idx].bytes for module in modules)
    size = own / sum(layer.full for layer in layers)  # bytes per number
    fixed = whole - tokens * own + tokens * sum(4 for layer in layers if layer.rotary)  # positions are int32
    room = int((job.keep * whole - fixed) // (tokens * size))
    if room < len(layers):
        least = (fixed + tokens * size * len(layers)) / whole
        raise CompressionError(
            "`keep`",
            expected=f"at least {least:.3g} of the cache of {tokens:,} tokens",
            got=f"{job.keep:g}",
            fix=f"Keep more: {1 - tokens * own / whole:.0%} of these bytes belong to layers without latents.",
        )
    return room


def ranks_for_tolerance(nats: list[Float64[Tensor, "_"]], tolerance: float | int) -> list[int]:
    """Return the least ranks whose removed directions cost at most `tolerance` nats per token in total."""
    worth = torch.cat([values[1:] for values in nats]).sort(descending=True).values
    lost = worth.flip(0).cumsum(0).flip(0)  # lost[n]: nats lost with n directions beyond 1 per layer
    return largest_ranks(nats, len(nats) + int((lost > tolerance).sum()))


def largest_ranks(nats: list[Float64[Tensor, "_"]], count: int) -> list[int]:
    """Return ranks that take the `count` largest directions of all layers, at least 1 per layer."""
    ranks = [1] * len(nats)
    rest = sorted((-float(value), layer) for layer, values in enumerate(nats) for value in values[1:])
    for _, layer in rest[: max(0, count - len(nats))]:
        ranks[layer] += 1
    return ranks
