"""A COLLAPSE of a ToST model whose own λ is not 1: the λ with which an audit finds none.

Such a block gives λx + f(x), a sum that leaves no place for a λ-skip, and that no bound is known of. So a λ
is named only after it was tried.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch
from rankwise.auditing.records import Finding
from rankwise.skips.modules import LambdaSkip
from rankwise.skips.probe import probing
from rankwise.skips.remedy import collapse_of

TRIED = (1.0, 2.0, 4.0, 8.0)
"""|λ| that are tried, the smallest first."""


def own_skips(model: nn.Module) -> dict[str, LambdaSkip]:
    """Return the `LambdaSkip` modules of a model by name, except those that compute a plain x + f(x)."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LambdaSkip) and (module.kind, module.init) != ("fixed", 1.0)
    }


def with_own_remedy(
    finding: Finding,
    model: nn.Module,
    skips: Mapping[str, LambdaSkip],
    batch: Batch,
    say: Callable[[str], None],
) -> Finding:
    """A COLLAPSE with the least |λ| of those tried with which an audit finds none, and where to put it in.

    Cost: an audit of the batch for each λ that is tried.

    Args:
        finding: the COLLAPSE.
        model: the model; nothing is written into it.
        skips: its `own_skips`.
        batch: what to audit it on, on its device.
        say: called with what is tried.
    """
    least = min(float(skip.current().abs().min()) for skip in skips.values())
    for scale in (each for each in TRIED if each > least):
        say(f"an audit with |λ| ≥ {scale:g}")
        with probing(model), torch.no_grad(), at_least(skips, scale):
            left = collapse_of(model, batch, finding.where.stack)
        if left is None:
            return _told(finding, f"{_where(skips, scale)}: an audit with it finds no COLLAPSE")
    most = f"|λ| = {max(TRIED):g}" if least < max(TRIED) else f"its |λ| ≥ {least:.3g}"
    return _told(
        finding, f"train it with a larger `skip_init`: an audit with {most} still finds the COLLAPSE"
    )


@contextmanager
def at_least(skips: Mapping[str, LambdaSkip], scale: float) -> Iterator[None]:
    """Every |λ| below a scale is that scale, its sign kept, for as long as the block runs.

    Args:
        skips: `own_skips` of a model.
        scale: the least |λ|.
    """

    def scaled(skip: LambdaSkip, given: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        x, update = given
        own = skip.current().to(x)
        return torch.where(own < 0, -1, 1).to(x) * own.abs().clamp(min=scale) * x + update

    hooks = [skip.register_forward_hook(scaled) for skip in skips.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _where(skips: Mapping[str, LambdaSkip], scale: float) -> str:
    """Where λ is: in the configuration, or in weights, where `skip_init` is only what they began from."""
    below = {name: skip for name, skip in skips.items() if bool((skip.current().abs() < scale).any())}
    learned = [f"{name}.weight" for name, skip in below.items() if skip.weight is not None]
    if learned:
        more = f" and {len(learned) - 1} more" if len(learned) > 1 else ""
        return f"raise |λ| below {scale:g} to {scale:g} in the learned `{learned[0]}`{more}"
    first = next(iter(below.values()))
    fixed = '"skip": "fixed", ' if first.kind == "none" else ""
    sign = -1 if first.kind == "fixed" and first.init < 0 else 1
    return f'put `{fixed}"skip_init": {sign * scale:g}` into the config.json of the model'


def _told(finding: Finding, remedy: str) -> Finding:
    return finding.model_copy(update={"remedy": remedy})
