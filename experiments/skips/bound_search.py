"""Adversarial search for states that violate the bounds on μ behind a λ-skip and a norm.

Claim     docs/explanation/skip-bound.md: μ behind LayerNorm or RMSNorm of λY + B is at least the larger of a
          bound by rows and one by the mean row, in whatever direction B points; and the paper's Theorem 4.1.
Measured  The largest (bound − μ) that gradient ascent over Y and B, or over Y, M and C, finds: both norms, ε
          from 0 to 1, four shapes, random starts, starts with similar tokens, and with B against
          the differences of the tokens. The smallest |λ| that each bound requires in trained models.
Hardware  one CPU core, float64, about three minutes
Expect    no violation; on all-MiniLM-L6-v2 the bound by the mean row lowers the smallest |λ| of every layer.
          The demo has no norm behind its sums, so that both bounds require the same |λ|
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from experiments.real_models import demo, minilm
from experiments.render import markdown_table
from experiments.study import Study
from rankwise.auditing import text_batches
from rankwise.cli.load_data import load_text
from rankwise.cli.load_model import demo_model, demo_text
from rankwise.skips.hook_places import find_places
from rankwise.skips.observe import observe
from rankwise.theory import min_lambda_for_spread, min_lambda_paper, skip_bound

SHAPES = ((2, 2), (3, 8), (8, 3), (12, 16))
STARTS = ("random", "alike", "against", "towards")
KEEP = math.sqrt(0.5)
"""Share of μ that a layer should keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    eps: tuple[float, ...] = (0.0, 1e-5, 0.1, 1.0)
    steps: int = 150
    copies: int = 4
    """Number of draws per start, with other sizes of B."""
    rate: float = 0.03
    tokens: int = 128
    sequences: int = 4
    seed: int = 0


def normed(x: Tensor, centre: bool, eps: float) -> Tensor:
    """Return LayerNorm or RMSNorm without gain."""
    x = x - x.mean(-1, keepdim=True) if centre else x
    return x / (x.square().mean(-1, keepdim=True) + eps + 1e-300).sqrt()


def mu(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x - x.mean(-2, keepdim=True), dim=(-2, -1))


def rows_of(y: Tensor, b: Tensor, centre: bool, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return directions, how far each row can move, and its smallest length, in units of √D, at λ = 1."""
    if centre:
        y, b = y - y.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    size, move = (torch.linalg.vector_norm(x, dim=-1) / math.sqrt(y.shape[-1]) for x in (y, b))
    ratio = move / size
    chord = torch.where(ratio < 1, 2 * torch.sin(torch.asin(ratio.clamp(max=1 - 1e-12)) / 2), 2.0)
    smallest = (size - move).clamp(min=0)
    length = smallest / (smallest.square() + eps + 1e-300).sqrt()
    return y / size[..., None] / math.sqrt(y.shape[-1]), (chord + 1 - length).clamp(max=2), length


def by_rows(y: Tensor, b: Tensor, centre: bool, eps: float) -> Tensor:
    """Return √D·μ(U) − ‖e‖."""
    units, moved, _ = rows_of(y, b, centre, eps)
    return math.sqrt(y.shape[-1]) * (mu(units) - torch.linalg.vector_norm(moved, dim=-1))


def by_mean(y: Tensor, b: Tensor, centre: bool, eps: float) -> Tensor:
    """Return the signed root of Σ r² − T(√D‖ū‖ + ē)²."""
    units, moved, length = rows_of(y, b, centre, eps)
    mean = torch.linalg.vector_norm(units.mean(-2), dim=-1) + moved.mean(-1)
    square = length.square().sum(-1) - y.shape[-2] * mean.square()
    return math.sqrt(y.shape[-1]) * square.sign() * (square.abs() + 1e-300).sqrt()


BOUNDS: dict[str, Callable[[Tensor, Tensor, bool, float], Tensor]] = {"rows": by_rows, "mean": by_mean}


def starts(recipe: Recipe, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw states and branches to start from, several of each kind."""
    generator = torch.Generator().manual_seed(recipe.seed + 100 * tokens + width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    states, branches = [], []
    for start in STARTS:
        for copy in range(recipe.copies):
            y, b = draw(2, tokens, width)
            if start == "alike":
                y = 0.05 * y + draw(1, width)
            if start == "against":
                b = -(y - y.mean(0)) + 0.1 * b
            if start == "towards":
                b = draw(1, width) + 0.1 * b
            states.append(y)
            branches.append(b * 3.0 ** -(1 + copy))
    return torch.stack(states), torch.stack(branches)


Violation = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Returns the objective of the ascent, (bound − μ), and where the bound is above 0."""


def ascend(recipe: Recipe, values: list[Tensor], violation: Violation) -> tuple[Tensor, Tensor]:
    """Return all violations on the path of Adam, and where the bound is above 0."""
    values = [value.clone().requires_grad_() for value in values]
    optimizer = torch.optim.Adam(values, lr=recipe.rate)
    met, spoke = [], []
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        upwards, found, speaks = violation(*values)
        met.append(found.detach())
        spoke.append(speaks.detach())
        (-upwards).sum().backward()
        for value in values:
            assert value.grad is not None
            value.grad.nan_to_num_(0.0)
        optimizer.step()
    return torch.stack(met).flatten(), torch.stack(spoke).flatten()


def search_bound(recipe: Recipe, name: str, centre: bool, eps: float) -> dict[str, Any]:
    """Ascend on (bound − μ) of one bound."""

    def violation(y: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bound, before = BOUNDS[name](y, b, centre, eps), by_rows(y, 0 * b, centre, 0.0)
        shipped = skip_bound(y, b, 1.0, norm="layer" if centre else "rms", eps=eps)
        assert bool((shipped >= bound - 1e-9 * before).all())  # the package returns the better of two
        found = mu(normed(y + b, centre, eps))
        return (bound - found) / before, (shipped - found) / before, shipped > 0

    starting = [list(starts(recipe, *shape)) for shape in SHAPES]
    return _search(recipe, name, centre, eps, starting, violation)


def search_theorem(recipe: Recipe, centre: bool, eps: float) -> dict[str, Any]:
    """Ascend on a·μ² − μ_out², at the largest a for which the theorem's hypotheses hold."""

    def violation(
        raw: Tensor, m: Tensor, c: Tensor, sizes: Tensor, size: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        u = normed(raw, centre, 0.0)
        y = u * (0.2 * sizes).exp()
        tokens, width = y.shape[-2:]
        lengths = torch.linalg.vector_norm(y, dim=-1) / math.sqrt(width)
        m, c = (x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (m, c))
        product = 0.5 * torch.sigmoid(size)
        q = lengths.square().mean(-1).sqrt()
        strength = ((product * q).square() + eps).sqrt() / lengths.amin(-1)
        before = mu(u).square()
        a = (1 - 2 * tokens * width * strength / before) / (strength + 1).square()
        for i in (
            (a.detach() > 1e-6).nonzero()[:1].flatten().tolist()
        ):  # there, λ = 1 is the least of the package
            matrices = [x[i].detach() for x in (y, product[:, None, None] * m, c)]
            norm: Any = "layer" if centre else "rms"
            least = min_lambda_paper(*matrices, keep_spread=a[i].sqrt().item(), norm=norm, eps=eps)
            assert math.isclose(least.item(), 1, rel_tol=1e-6)
        found = mu(normed(product[:, None, None] * m @ y @ c + y, centre, eps)).square()
        found = (a * before - found) / before
        return found, found, a > 0

    starting = []
    for tokens, width in SHAPES:
        y, _ = starts(recipe, tokens, width)
        generator = torch.Generator().manual_seed(recipe.seed)
        drawn = [
            torch.randn(len(y), *shape, generator=generator, dtype=torch.float64)
            for shape in ((tokens, tokens), (width, width), (tokens, 1))
        ]
        starting.append([y, *drawn, torch.linspace(-6, 0, len(y), dtype=torch.float64)])
    return _search(recipe, "theorem", centre, eps, starting, violation)


def _search(
    recipe: Recipe, name: str, centre: bool, eps: float, starting: list[list[Tensor]], violation: Violation
) -> dict[str, Any]:
    """Return evaluations, how many had a bound above 0, and the largest (bound − μ) over the initial μ."""
    parts = [ascend(recipe, values, violation) for values in starting]
    met, spoke = (torch.cat(values) for values in zip(*parts, strict=True))
    return {
        "bound": name,
        "norm": "LayerNorm" if centre else "RMSNorm",
        "eps": eps,
        "evaluations": len(met),
        "speaking": int(spoke.sum()),
        "worst": float(met[spoke].max()) if bool(spoke.any()) else -math.inf,
    }


def smallest_by_rows(y: Tensor, b: Tensor, mask: Tensor, centre: bool, eps: float) -> float:
    """Return the smallest |λ| of the bound by rows alone, for the worst sequence."""
    worst = 0.0
    for rows, branch, real in zip(y.double(), b.double(), mask, strict=True):
        rows, branch = rows[real], branch[real]
        wanted = KEEP * by_rows(rows, 0 * branch, centre, 0.0)
        low, high = 0.0, 1e6
        for _ in range(60):
            middle = (low + high) / 2
            good = bool(by_rows(middle * rows, branch, centre, eps) >= wanted)
            low, high = (low, middle) if good else (middle, high)
        worst = max(worst, high)
    return worst


def smallest_scales(model: nn.Module, batch: Any) -> list[dict[str, Any]]:
    """Return per layer the smallest |λ| that guarantees √½ of μ, by rows alone and by the better of both."""
    found = []
    places, _ = find_places(model, batch)
    for one in observe(model, batch, places, {}):
        y, b, mask, norm = one.x, one.branch, one.mask, one.norm
        kind = ("layer" if norm.centre else "rms") if norm.known else "none"
        both = float(min_lambda_for_spread(y, b, KEEP, mask, kind, norm.eps if norm.known else 0.0).max())
        rows = smallest_by_rows(y, b, mask, norm.centre, norm.eps) if norm.known else both
        found.append(
            {"site": one.place.name, "norm": norm.kind, "rows": round(rows, 4), "both": round(both, 4)}
        )
    return found


def measure(recipe: Recipe) -> dict[str, Any]:
    """Search behind every norm and ε, and compute the smallest |λ| of the trained models."""
    norms = [(centre, eps) for centre in (True, False) for eps in recipe.eps]
    found = [search_bound(recipe, name, *norm) for name in BOUNDS for norm in norms]
    # the theorem has no content where √ε is large
    found += [search_theorem(recipe, centre, eps) for centre, eps in norms if eps < 0.1]
    folders: dict[str, Path | None] = {"all-MiniLM-L6-v2": minilm(), "demo": demo_model()}
    scales = {}
    for name, folder in folders.items():
        if folder is None:
            continue
        model = demo() if name == "demo" else AutoModel.from_pretrained(folder).eval()
        sizes = {"tokens": recipe.tokens, "sequences": recipe.sequences, "batch_size": recipe.sequences}
        tokenizer = AutoTokenizer.from_pretrained(folder)
        (batch,) = text_batches(load_text(demo_text()), tokenizer, **sizes)
        scales[name] = smallest_scales(model, batch)
    return {
        "settings": asdict(recipe),
        "text": demo_text().name,
        "unit": "worst: largest (promised − found) over μ of the directions, of the theorem over μ²",
        "evaluations": sum(one["evaluations"] for one in found),
        "searches": found,
        "least_scales": scales,
    }


def tables(report: dict[str, Any]) -> dict[str, str]:
    found = [
        (
            one["bound"],
            one["norm"],
            f"{one['eps']:g}",
            str(one["evaluations"]),
            str(one["speaking"]),
            f"{one['worst']:.2g}",
        )
        for one in report["searches"]
    ]
    scales = [
        (name, one["site"], one["norm"], f"{one['rows']:.3g}", f"{one['both']:.3g}")
        for name, layers in report["least_scales"].items()
        for one in layers
    ]
    return {
        "searches": markdown_table(("bound", "norm", "ε", "evaluations", "bound above 0", "worst"), found),
        "scales": markdown_table(("model", "site", "norm", "smallest abs(λ) by rows", "by both"), scales),
    }


STUDY = Study("bound_search", lambda data: measure(Recipe()), tables=tables)
