"""What a plan refuses."""

import math

from torch import Tensor

from rankwise.errors import RankwiseError, ShapeError, did_you_mean
from rankwise.plan.states import BLOCKS, INPUTS, POSITIONS, Setting
from rankwise.theory.barrier import MASKS
from rankwise.theory.random_rank import MAX_ENTRIES


def given_states(tokens: int | Tensor) -> Tensor | None:
    """Token states (B, T, D) of the user's own; None where a length was given."""
    if not isinstance(tokens, Tensor):
        return None
    states = tokens.detach().cpu()
    states = states[None] if states.ndim == 2 else states
    if states.ndim != 3 or not states.is_floating_point() or not bool(states.isfinite().all()):
        raise ShapeError(
            "`tokens`",
            expected="a length, or finite token states of shape (T, D) or (B, T, D)",
            got=f"{tokens.dtype} of shape {tuple(tokens.shape)}"
            + ("" if not states.is_floating_point() or states.isfinite().all() else " with NaN or infinity"),
            fix="Give embeddings, not token ids.",
        )
    if bool((states.flatten(1).abs().amax(1) == 0).any()):
        raise ShapeError("`tokens`", expected="states that are not all 0", got="zeros", fix="Leave them out.")
    return states


def check_drawn(inputs: str | None, given: Tensor | None) -> None:
    """Refuse a way to draw token states beside states that are given."""
    if inputs is not None and given is not None:
        raise RankwiseError(
            "`inputs`",
            expected="nothing beside token states of your own: it says how states are drawn",
            got=repr(inputs),
            fix="Leave it out, or give a length as `tokens`.",
        )


MAX_TOKENS = 131_072
"""A trial of T² K_max products takes about half an hour on one core there."""


def check_fit(setting: Setting, widths: tuple[int, ...], width: int | None) -> None:
    """Refuse sizes that do not fit together."""
    if width is not None and setting.given is not None and width != setting.dim:
        raise ShapeError(
            "`width`", expected=f"{setting.dim}, as the token states", got=str(width), fix="Leave it out."
        )
    if setting.inputs == "orthonormal" and not setting.knows_no_width and setting.dim < setting.tokens:
        raise ShapeError(
            "`inputs`",
            expected=f"a width of at least {setting.tokens}: more than D rows of width D are not orthonormal",
            got=f"orthonormal with D = {setting.dim}",
            fix='Use inputs="gaussian".',
        )
    if setting.temperature > 0 and setting.tokens**2 > MAX_ENTRIES:
        raise ShapeError(
            "`tokens`",
            expected=f"at most {math.isqrt(MAX_ENTRIES):,} at a temperature above 0: matrices are factorised",
            got=f"{setting.tokens:,}",
            fix="Use temperature 0, which counts winners.",
        )
    if setting.kv_heads is not None and (setting.heads is None or setting.heads % setting.kv_heads):
        raise ShapeError(
            "`kv_heads`",
            expected="a divisor of `heads`, which must be given with it",
            got=f"heads={setting.heads}, kv_heads={setting.kv_heads}",
            fix="For 12 heads in groups of 3 give heads=12, kv_heads=4.",
        )
    if setting.layers > 1 and setting.heads is None and widths[-1] > setting.dim:
        raise ShapeError(
            "`head_dims`",
            expected=f"at most {setting.dim} where D = H·K",
            got=str(widths[-1]),
            fix="Give `heads` for D ≠ H·K, or narrower widths.",
        )


def check_names(mask: str, inputs: str | None, positions: str, block: str | None) -> None:
    """Refuse names that nothing has."""
    names = {"mask": (mask, MASKS), "positions": (positions, POSITIONS)}
    names |= {"inputs": (inputs, INPUTS)} if inputs is not None else {}
    names |= {"block": (block, BLOCKS)} if block is not None else {}
    for name, (value, known) in names.items():
        if value not in known:
            raise RankwiseError(
                f"`{name}`",
                expected=" or ".join(map(repr, known)),
                got=repr(value),
                fix=did_you_mean(str(value), known),
            )


def check_sizes(sized: dict[str, int | None]) -> None:
    """Refuse sizes that are no whole numbers from 1."""
    for name, value in sized.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if (value is None and name == "layers") or (value is not None and not (whole and value >= 1)):
            raise ShapeError(
                f"`{name}`",
                expected="a whole number, at least 1",
                got=repr(value),
                fix="Leave it out or mend it.",
            )


def check_numbers(
    tokens: object, tolerance: float, temperature: float, delta: float, trials: int, seed: int
) -> None:
    """Refuse numbers without a meaning."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise ShapeError(
            "`tokens`",
            expected="two tokens or more",
            got=repr(tokens),
            fix="A single token mixes with itself alone: its rank is 1 at every width.",
        )
    if tokens > MAX_TOKENS:
        raise ShapeError(
            "`tokens`",
            expected=f"at most {MAX_TOKENS:,}: time grows as T²",
            got=f"{tokens:,}",
            fix="Plan for fewer tokens; the law in ln T says how K* goes on.",
        )
    wanted = {
        "tolerance": (tolerance, 0 < tolerance < 1, "a number in (0, 1)", "0.01 is the paper's."),
        "temperature": (
            temperature,
            math.isfinite(temperature) and temperature >= 0,
            "a finite number, at least 0",
            "It is in units of √K: 0 is hardmax, 1 the usual softmax.",
        ),
        "delta": (delta, math.isfinite(delta) and delta > 0, "a finite number above 0", "0.01 is usual."),
        "seed": (seed, isinstance(seed, int) and seed >= 0, "a whole number, at least 0", "0 is usual."),
        "trials": (trials, trials >= 2, "2 or more", "The spread over trials is part of the answer."),
    }
    for name, (value, good, form, fix) in wanted.items():
        if not good:
            raise RankwiseError(f"`{name}`", expected=form, got=repr(value), fix=fix)
