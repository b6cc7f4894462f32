"""λ-skips can be added to these model families, change nothing at λ = 1, and can be removed again.

Builds each family tiny and with random weights (no download), and checks

- the captured mixers against the model's own products (float64; Mamba and similar families in float32);
- outputs with λ-skips at λ = 1 and without, bit by bit (float32);
- that the gradient of a loss reaches every λ, and is not zero;
- that after `remove_lambda_skip` outputs, parameter names and hooks are as before;
- at other λ, the model against a forward pass in which the residual sums themselves are scaled.

Hardware  one CPU core, a minute
Expect    yes everywhere, and differences of rounding
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.coverage.families import check, check_state_space, shown
from experiments.render import markdown_table
from experiments.study import Study
from experiments.zoo.state_space import STATE_SPACE, tiny
from experiments.zoo.transformers import BERT, FAMILIES, hugging_face, text_inputs
from rankwise._internals.torch_private import forward_hooks
from rankwise.skips import Skips, add_lambda_skip, remove_lambda_skip
from rankwise.skips.observe import scaled_sums, without_skips
from rankwise.skips.residual_sums import run_with, tensors_in

HEADINGS = (
    "family", "λ-skips", "captured, max \\|M V − own\\|", "no-op at λ = 1, bit-identical",
    "gradient of every λ non-zero", "other λ against scaled sums, relative", "undo identical",
)  # fmt: skip
ROUNDING = 1e-3
"""Rounding of a float32 model causes smaller errors than this."""
OTHERS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(tiny, name) for name in ("Mamba", "Mamba-2", "Bamba", "Jamba")},
    "FNet": hugging_face("FNetModel", **{key: BERT[key] for key in BERT if key != "num_attention_heads"}),
}
REFUSED = "hand-written einsum"
"""Family without λ-skips: its attention is written in the block, so that no module returns f(x)."""
NAMES = (*(family.name for family in FAMILIES if family.name != REFUSED), *OTHERS)
Row = dict[str, Any]


def is_right(row: Row) -> bool:
    """Return if everything is as claimed; a mixer without a captured operator has no error of capture."""
    close = all(error < ROUNDING for error in (row["error"], row["captured"] or 0.0))
    return bool(row["skips"] > 0 and row["identical"] and row["learns"] and row["undone"] and close)


def outputs(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        return tensors_in(model(**batch))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def check_skips(name: str, model: nn.Module, batch: dict[str, Any], captured: float | None) -> Row:
    """Add skips, test and remove them; `captured` is the largest error of capture."""
    before, keys = outputs(model, batch), list(model.state_dict())
    skips = add_lambda_skip(model, example=batch)
    identical = same(outputs(model, batch), before)
    learns = all(0 < float(one.abs().sum()) < float("inf") for one in gradients(model, batch, skips))
    error = error_at_other_scales(model, batch, skips)
    remove_lambda_skip(model)
    hooks = any(forward_hooks(module) for module in model.modules())
    undone = same(outputs(model, batch), before) and list(model.state_dict()) == keys and not hooks
    return {
        "name": name,
        "skips": len(skips),
        "captured": captured,
        "identical": identical,
        "learns": learns,
        "error": error,
        "undone": undone,
    }


def gradients(model: nn.Module, batch: dict[str, Any], skips: Skips) -> tuple[Tensor, ...]:
    """Return the gradients of a sum in which every output has another weight."""
    out = tensors_in(model(**batch))[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).sin().view(out.shape)
    return torch.autograd.grad((out * weights).sum(), list(skips.values()))


def error_at_other_scales(model: nn.Module, batch: dict[str, Any], skips: Skips) -> float:
    """Return the largest relative difference from a forward pass with scaled sums; NaN if one is NaN."""
    with torch.no_grad():
        for at, parameter in enumerate(skips.values()):
            parameter.fill_(-0.5 - 0.1 * at)
    scales = {name: parameter.detach() for name, parameter in skips.items()}
    with without_skips(model):
        wanted = run_with(model, batch, scaled_sums(list(skips.places.values()), scales))
    pairs = zip(wanted, outputs(model, batch), strict=True)
    errors = [(one - other).norm() / one.norm() for one, other in pairs]
    return float(torch.stack(errors).max())


def measure(names: Collection[str] = NAMES) -> dict[str, Any]:
    found = []
    for family in FAMILIES:
        if family.name in names:
            implementation = family.implementations[0]
            captured = check(family, implementation).product_error
            model = family.build(implementation)
            found.append(check_skips(family.name, model, family.inputs(), captured))
    for name, build in OTHERS.items():
        if name in names:
            error = check_state_space(name).mixer_error if name in STATE_SPACE else None
            found.append(check_skips(name, build(), text_inputs(), error))
    return {"rows": found}


def cells(row: Row) -> tuple[str, ...]:
    same, learns, undone = ("yes" if row[name] else "no" for name in ("identical", "learns", "undone"))
    captured = "not captured" if row["captured"] is None else shown(row["captured"])
    return row["name"], str(row["skips"]), captured, same, learns, shown(row["error"]), undone


def tables(report: dict[str, Any]) -> dict[str, str]:
    return {"table": markdown_table(HEADINGS, map(cells, report["rows"]))}


STUDY = Study("skip_families", lambda data: measure(), "evidence/skip-families", tables)
