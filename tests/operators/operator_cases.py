"""Operators of every kind, and how far rounding may carry an answer."""

import torch
from hypothesis import strategies as st
from tests.operators.linear_time_cases import LINEAR_TIME, Make, normal

import rankwise as rw
from rankwise.operators import IndexedMixing, MixingOperator


def softmax_of(mask: str = "none", causal: bool = False, groups: int = 1, scale: float | None = None) -> Make:
    """A maker of softmax operators with one kind of mask."""

    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        H = H * groups
        query, key = normal(B, H, T, K), normal(B, H // groups, S, K)
        seen = torch.rand(B, H, T, S) < 0.7
        masks = {
            "none": None,
            "bool": seen,
            "bool (B, 1, 1, S)": seen[:, :1, :1],
            "bool with empty rows": seen & (torch.arange(T) % 3 != 0)[:, None],
            "bias": normal(B, H, T, S),
            "bias of -inf": normal(1, 1, T, S).masked_fill(~seen[:1, :1], -torch.inf),
        }
        return rw.operators.SoftmaxMixing(query, key, masks[mask], causal, scale)

    return make


def dense(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
    return rw.operators.DenseMixing(normal(B, H, T, S))


def stochastic(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
    matrix = normal(B, H, T, S).softmax(-1) * (torch.rand(B, H, T, S) < 0.8)
    return rw.operators.DenseMixing(matrix, torch.rand(1, 1, T, S) < 0.9)


MASKS = ("none", "bool (B, 1, 1, S)", "bool with empty rows", "bias", "bias of -inf")
KINDS: dict[str, Make] = {"dense": dense, "dense with a mask": stochastic}
KINDS |= {f"softmax, {mask}": softmax_of(mask) for mask in MASKS}
KINDS |= {f"softmax, causal, {mask}": softmax_of(mask, causal=True) for mask in MASKS[::2]}
KINDS |= {f"softmax, grouped, {mask}": softmax_of(mask, groups=3) for mask in ("bool", "bias")}
KINDS |= {"softmax, scaled": softmax_of(scale=-1.7), "softmax, scale 0": softmax_of(scale=0.0)}
KINDS |= {name: case.make for name, case in LINEAR_TIME.items()}
WHOLE = (
    "dense with a mask",
    "softmax, grouped, bias",
    "toeplitz",
    "semiseparable, grouped, stepped",
)
"""Kinds whose transposes and parts are kinds, too: both are computed from the whole in the same way."""


def transposed(make: Make) -> Make:
    return lambda *size: make(*size).mT


KINDS |= {f"{name}, transposed": transposed(KINDS[name]) for name in WHOLE}


def part_of(make: Make) -> Make:
    """Some rows and columns, one of each at least."""

    def picked(*size: int) -> MixingOperator:
        op = make(*size)
        keep = [torch.rand(count) < 0.6 for count in op.shape[-2:]]
        for one in keep:
            one[torch.randint(len(one), (1,))] = True
        return IndexedMixing(op, *keep)

    return picked


KINDS |= {f"part of {name}": part_of(KINDS[name]) for name in WHOLE}


def case_id(kind: str) -> str:
    """The id of a case, with no space in it, so that `-k gated_delta` picks both a file and its cases."""
    return "-".join(part.replace(" ", "_") for part in kind.split(", "))


sizes = st.tuples(*(st.integers(1, top) for top in (3, 2, 6, 6, 4)))
"""Batch, heads, tokens, sources, head width."""


def tolerance(dtype: torch.dtype, terms: int, size: float = 10.0) -> float:
    """A sum of ``terms`` products of at most ``size``, each computed in a few roundings."""
    return 8 * terms * size * torch.finfo(dtype).eps
