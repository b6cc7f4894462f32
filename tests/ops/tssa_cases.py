"""Calls of `tssa` drawn from a seed, and their outputs, gradients and errors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankwise.ops import TSSAOutput, TSSAState, tssa


@dataclass
class Case:
    """One call; `inputs` are what gradients are taken of."""

    shape: tuple[int, int, int, int] = (2, 9, 3, 5)
    causal: bool = False
    masked: bool = False
    decayed: bool = False
    stated: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0
    options: dict = field(init=False)
    w: Tensor = field(init=False)
    temperature: Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32

        def normal(*shape: int, dtype: torch.dtype = exact) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

        batch, tokens, heads, width = self.shape
        self.w = normal(*self.shape, dtype=self.dtype)
        self.temperature = 1 + normal(heads).abs()
        mask = torch.rand(batch, tokens, generator=g) > 0.3 if self.masked else None
        state = None
        if self.stated:
            energy, assigned = (normal(batch, heads, width).abs() for _ in range(2))
            state = TSSAState(energy, assigned, normal(batch, heads).abs(), torch.arange(batch))
        bias = 0.1 * normal(heads, tokens + batch) if self.biased else None
        ladder = torch.tensor([0.7, 3.0, 30.0, torch.inf])[-heads:] if self.decayed else None
        self.options = {"causal": self.causal, "mask": mask, "state": state, "bias": bias}
        self.options["half_life"] = ladder

    def run(self, impl: str, **changes: object) -> TSSAOutput:
        return tssa(self.w, self.temperature, impl=impl, **(self.options | changes))

    def inputs(self) -> dict[str, Tensor]:
        out = {"w": self.w, "temperature": self.temperature}
        if self.options["bias"] is not None:
            out["bias"] = self.options["bias"]
        if self.options["state"] is not None:
            out |= {
                f"state.{name}": part for name, part in zip("eam", self.options["state"][:3], strict=True)
            }
        return out


def outputs(result: TSSAOutput) -> dict[str, Tensor]:
    """Everything a gradient can come back through."""
    out = {"output": result.output, "membership": result.membership}
    return out | ({} if result.state is None else dict(zip("eam", result.state[:3], strict=True)))


def outputs_and_gradients(case: Case, impl: str) -> dict[str, Tensor]:
    """Outputs, and gradients of all inputs from random ones of all outputs."""
    inputs = case.inputs()
    for x in inputs.values():
        x.requires_grad_()
    found = outputs(case.run(impl))
    g = torch.Generator().manual_seed(99)
    given = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x) for x in found.values()]
    asked = [(x, g) for x, g in zip(found.values(), given, strict=True) if x.requires_grad]
    back = torch.autograd.grad(
        [x for x, _ in asked], list(inputs.values()), [g for _, g in asked], allow_unused=True
    )
    for x in inputs.values():
        x.requires_grad_(False)
    return {k: v.detach() for k, v in found.items()} | {
        f"d {name}": g for name, g in zip(inputs, back, strict=True) if g is not None
    }


def gradients_with_a_later_nan(
    case: Case, impl: str, wrong: float
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Return the gradients of a loss on tokens 0…59 without and with a wrong number in token 70.

    The third result is the gradient of w for a squared loss on all outputs, with the wrong number.
    """
    inputs, found = case.inputs(), []
    for x in inputs.values():
        x.requires_grad_()
    for changed in (False, True):
        if changed:
            with torch.no_grad():
                case.w[0, 70, 1, 2] = wrong
        output, membership, _ = case.run(impl)
        weight = torch.randn(output[:, :60].shape, generator=torch.Generator().manual_seed(1)).to(output)
        loss = (output[:, :60] * weight).sum() + (membership[:, :60] * weight[..., 0]).sum()
        found.append(torch.autograd.grad(loss, list(inputs.values()), allow_unused=True))
    (all_read,) = torch.autograd.grad(case.run(impl).output.square().sum(), case.w)
    named = [{k: g for k, g in zip(inputs, each, strict=True) if g is not None} for each in found]
    return named[0], named[1], all_read


def errors(got: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Distance of each tensor from the truth, relative to the truth's norm."""
    assert got.keys() == truth.keys()
    out = {}
    for name, wanted in truth.items():
        assert got[name].shape == wanted.shape, name
        wanted = wanted.double()
        out[name] = float((got[name].double() - wanted).norm() / wanted.norm().clamp(min=1e-300))
    return out


def double(case: Case) -> Case:
    """The same call with every number in float64."""
    other = Case(**{k: v for k, v in vars(case).items() if k not in ("options", "w", "temperature")})
    other.w, other.temperature = case.w.double(), case.temperature.double()

    def wide(x: object) -> object:
        if isinstance(x, TSSAState):
            return TSSAState(*(part.double() for part in x[:3]), x.seen)
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    other.options = {name: wide(value) for name, value in case.options.items()}
    return other
