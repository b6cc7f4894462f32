"""Claim: λ-skips go into these model families, do exactly nothing at λ = 1, and come out again.

Builds each family tiny and with random weights (no download), and checks

- what capture sees of its mixers, against the model's own products (float64; Mamba and kin in float32);
- outputs with λ-skips at λ = 1 and without, bit by bit (float32);
- that the gradient of a loss reaches every λ, and is not zero;
- that after `remove_lambda_skip` outputs, parameter names and hooks are as before;
- at other λ, the model against a forward pass in which the residual sums themselves are scaled.

    python -m experiments.skip_families

writes docs/skip-families.md (a minute on one core). Expected: yes everywhere, and differences of rounding.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.families import FAMILIES, shown
from experiments.family_checks import check
from experiments.state_space_checks import check_state_space
from experiments.state_space_models import STATE_SPACE
from experiments.tiny_models import BERT, LLAMA, hugging_face, text_inputs
from rankwise._internals.torch_private import forward_hooks, forward_pre_hooks
from rankwise.skips import Skips, add_lambda_skip, remove_lambda_skip
from rankwise.skips.find import run_with, tensors_in
from rankwise.skips.observe import scaled_sums, without_skips

PAGE = Path(__file__).parents[1] / "docs" / "skip-families.md"
HEADINGS = (
    "family",
    "λ-skips",
    "captured, max \\|M V − own\\|",
    "no-op at λ = 1, bit-identical",
    "gradient of every λ non-zero",
    "other λ against scaled sums, relative",
    "undo identical",
)
ROUNDING = 1e-3
"""No error of a float32 model is as large, unless something other than rounding made it."""
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}
HYBRID = {
    "mamba_d_state": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2}
JAMBA |= {"num_experts_per_tok": 1, "mamba_d_state": 4}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "Mamba": hugging_face("MambaModel", **MAMBA),
    "Mamba-2": hugging_face(
        "Mamba2Model", **MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=8, expand=2
    ),
    "Bamba": hugging_face("BambaModel", **LLAMA | HYBRID, attn_layer_indices=[1], mamba_expand=2),
    "Jamba": hugging_face("JambaModel", **LLAMA | JAMBA),
    "FNet": hugging_face("FNetModel", **{key: BERT[key] for key in BERT if key != "num_attention_heads"}),
}


@dataclass(frozen=True)
class Row:
    """What one family showed."""

    name: str
    skips: int
    captured: float | None
    """Largest error of capture; None where the mixer is no operator that is captured."""
    identical: bool
    learns: bool
    error: float
    undone: bool

    @property
    def right(self) -> bool:
        """Whether all is as claimed."""
        close = all(error < ROUNDING for error in (self.error, self.captured or 0.0))
        return self.skips > 0 and self.identical and self.learns and self.undone and close

    def line(self) -> str:
        """One row of the table."""
        words = ("yes" if one else "no" for one in (self.identical, self.learns, self.undone))
        same, learns, undone = words
        captured = "not captured" if self.captured is None else shown(self.captured)
        cells = (self.name, str(self.skips), captured, same, learns, shown(self.error), undone)
        return f"| {' | '.join(cells)} |"


def outputs(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """What a model gives, without gradients."""
    with torch.no_grad():
        return tensors_in(model(**batch))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit by bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def look_at(name: str, model: nn.Module, batch: dict[str, Any], captured: float | None) -> Row:
    """Put skips in, try them, take them out."""
    before, keys = outputs(model, batch), list(model.state_dict())
    skips = add_lambda_skip(model, example=batch)
    identical = same(outputs(model, batch), before)
    learns = all(0 < float(one.abs().sum()) < float("inf") for one in gradients(model, batch, skips))
    error = at_other_scales(model, batch, skips)
    remove_lambda_skip(model)
    hooks = any(forward_hooks(module) or forward_pre_hooks(module) for module in model.modules())
    undone = same(outputs(model, batch), before) and list(model.state_dict()) == keys and not hooks
    return Row(name, len(skips), captured, identical, learns, error, undone)


def gradients(model: nn.Module, batch: dict[str, Any], skips: Skips) -> tuple[Tensor, ...]:
    """Of a sum that weighs every output differently."""
    out = tensors_in(model(**batch))[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).sin().view(out.shape)
    return torch.autograd.grad((out * weights).sum(), list(skips.values()))


def at_other_scales(model: nn.Module, batch: dict[str, Any], skips: Skips) -> float:
    """Largest relative difference from a forward pass with scaled sums."""
    with torch.no_grad():
        for at, parameter in enumerate(skips.values()):
            parameter.fill_(-0.5 - 0.1 * at)
    scales = {name: parameter.detach() for name, parameter in skips.items()}
    with without_skips(model):
        wanted = run_with(model, batch, scaled_sums(list(skips.sites.values()), scales))
    pairs = zip(wanted, outputs(model, batch), strict=True)
    errors = [(one - other).norm() / one.norm() for one, other in pairs]
    return float(torch.stack(errors).max())  # NaN, if one is


def rows(names: Collection[str]) -> list[Row]:
    """The families of these names."""
    found = []
    for family in FAMILIES:
        if family.name not in names:
            continue
        implementation = family.implementations[0]
        captured = check(family, implementation).product_error
        found.append(look_at(family.name, family.build(implementation), family.inputs(), captured))
    for name, build in OTHERS.items():
        if name not in names:
            continue
        captured = check_state_space(name).mixer_error if name in STATE_SPACE else None
        found.append(look_at(name, build(), text_inputs(), captured))
    return found


def page(found: list[Row], command: str) -> str:
    """The whole page."""
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}", *(row.line() for row in found)]
    return (
        "# λ-skips by family\n\n"
        f"Written by `{command}` with {versions}, Python {platform.python_version()}, "
        f"{platform.machine()} CPU. Tiny models with random weights, float32; capture in float64.\n\n"
        + "\n".join(lines)
        + "\n\nλ-skips counts parameters: layers that share their weights (ALBERT) share λ. T5 has one for "
        "each self-attention and each cross-attention. Capture of Mamba and its kin is compared in float32, "
        "relative to the largest entry of what their layer gave; FNet's mixer is no operator we capture. "
        "Falcon-H1 is refused: multipliers stand between what its mixers give and the sum. The last column "
        "but one compares with a forward pass in which the residual operands of the sums were scaled as they "
        "were added; what is left is rounding.\n"
    )


def main(arguments: list[str] | None = None) -> int:
    """Check all families (or some) and write the page; the exit status says whether all is as claimed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [*(family.name for family in FAMILIES), *OTHERS]
    parser.add_argument("--families", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write")
    given = parser.parse_args(arguments)
    found = rows(given.families)
    given.page.write_text(page(found, "python -m experiments.skip_families"), encoding="utf-8")
    print(f"wrote {given.page}")
    wrong = [row.name for row in found if not row.right]
    if wrong:
        print(f"not as claimed: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
