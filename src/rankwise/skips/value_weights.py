"""Value and output weights of attention, found by their numbers, and the norm of its matrices."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch, run_model
from rankwise.errors import CaptureError
from rankwise.skips.find import probe_mode
from rankwise.skips.locate import SkipSite
from rankwise.skips.observe import Lambdas, with_lambdas
from rankwise.skips.sums import SumName
from rankwise.tracing import MixerSite, RecordedCall, capture, record_calls


@dataclass
class Mixing:
    """Norms of the mixer of one λ-skip."""

    norm: float
    """‖M‖_F of the worst sequence, all heads together."""
    value_norm: float | None = None
    """‖C‖_F of all heads together; None unless the output of the output projection is the branch."""
    max_row_norm: Tensor | None = None
    """Shape (B,): largest norm of a row that attention can write, with any weights."""
    unlike: str = "its value and output weights were not found"
    """Difference between the branch and the paper's Σ_h M_h Y C_h; empty if there is none."""


@dataclass
class MatrixCall:
    """Call of a module that has a matrix."""

    module: nn.Module
    given: Tensor
    gave: Tensor

    def linear(self) -> tuple[Tensor, Tensor] | None:
        """Return matrix (outputs first) and bias, or None if the call did not compute this linear map.

        A sum of K products in float32 or finer may be off by 8√K roundings of the sum of magnitudes, and by
        two roundings of the output dtype.
        """
        weight, bias = (getattr(self.module, name, None) for name in ("weight", "bias"))
        given, gave = self.given.double(), self.gave.double()
        assert isinstance(weight, Tensor)  # only such modules are tapped
        shift = bias.detach().double() if isinstance(bias, Tensor) else gave.new_zeros(gave.shape[-1])
        for matrix in (weight.detach().double(), weight.detach().double().mT):
            if matrix.shape != (gave.shape[-1], given.shape[-1]) or shift.shape != gave.shape[-1:]:
                continue
            own = torch.finfo(self.gave.dtype).eps
            summed = 8 * math.sqrt(given.shape[-1]) * min(own, torch.finfo(torch.float32).eps)
            allowed = summed * (given.abs() @ matrix.abs().mT) + 2 * own * (gave.abs() + shift.abs())
            if bool(((given @ matrix.mT + shift - gave).abs() <= allowed).all()):
                return matrix.cpu(), shift.cpu()
        return None


def _has_matrix(_name: str, module: nn.Module) -> bool:
    return getattr(getattr(module, "weight", None), "ndim", 0) == 2


def _matrix_calls(calls: Iterable[RecordedCall]) -> list[MatrixCall]:
    found = []
    for call in calls:
        given, gave = call.args[0] if call.args else None, call.output
        if not isinstance(given, Tensor) or not isinstance(gave, Tensor) or gave.dim() < 2:
            continue
        if given.is_floating_point() and given.shape[:-1] == gave.shape[:-1]:
            found.append(MatrixCall(call.module, given, gave))
    return found


def mixings(
    model: nn.Module, batch: Batch, sites: Sequence[SkipSite], lambdas: Lambdas
) -> dict[tuple[str, int], Mixing]:
    """Return norms of the mixers of λ-skips, by name of the site and number of its call.

    A site is missing if its branch has no captured mixer, or several.
    """
    mixers: list[MixerSite] = []
    sums: dict[str, list[tuple[Tensor, Tensor]]] = {site.name: [] for site in sites}
    of_sum = {name: site.name for site in sites for name in site.sums}

    def note(name: SumName, residual: Tensor, branch: Tensor, total: Tensor) -> None:
        sums[of_sum[name]].append((residual, branch))

    # Hooks are off: outputs of projections are recorded without the (λ − 1)·x that a hook may add.
    with with_lambdas(model, sites, lambdas, note):
        # Copies: a gate or a gain applied in place would otherwise pass for a part of the weights.
        recording = record_calls(model, _has_matrix, copy=True)
        try:
            with (
                recording as calls,
                probe_mode(model),
                torch.no_grad(),
                capture(model, on_mixer=mixers.append, values=True),
            ):
                run_model(model, batch)
        except CaptureError:
            return {}
    matrices = _matrix_calls(calls)
    behind: dict[str, list[MixerSite]] = {site.name: [] for site in sites}
    for mixer in mixers:
        site = max(sites, key=lambda site: _common(site.name, mixer.name))
        if _common(site.name, mixer.name):
            behind[site.name].append(mixer)
    return {
        (site.name, number): _mixing(mixer, *operands, matrices)
        for site in sites
        # mixers side by side in one branch are left out
        if len(behind[site.name]) == len(sums[site.name])
        for number, (mixer, operands) in enumerate(zip(behind[site.name], sums[site.name], strict=True))
    }


def _common(first: str, other: str) -> int:
    """Return how many leading parts of two names agree; 0 if they differ in a number."""
    count = 0
    for a, b in zip(first.split("."), other.split("."), strict=False):
        if a != b:
            return 0 if a.isdigit() and b.isdigit() else count
        count += 1
    return count


def _mixing(mixer: MixerSite, residual: Tensor, branch: Tensor, calls: list[MatrixCall]) -> Mixing:
    operator = mixer.operator
    batch, heads = operator.shape[0], operator.shape[1]
    squares = torch.zeros(batch, dtype=torch.float64)
    for head in range(heads):
        dense = operator[:, head].dense(torch.float64)
        rows = mixer.valid_tokens.to(dense.device)[..., None]
        squares += (dense * rows).square().sum((-2, -1)).cpu()
    found = Mixing(float(squares.max().sqrt()))
    if mixer.kind != "softmax" or mixer.values is None or mixer.output is None:
        return found
    read = _columns_of(mixer.values, mixer.valid_sources, [call.gave for call in calls])
    gave = _columns_of(mixer.output, mixer.valid_tokens, [call.given for call in calls])
    if read is None or gave is None:
        return found
    into, out = calls[read[0]], calls[gave[0]]
    values, projection = into.linear(), out.linear()
    if values is None or projection is None or not _same(out.gave, branch):
        return found  # not linear, or a gain, a norm or another summand is between
    value_weights = [values[0][head] for head in read[1]]
    output_weights = [projection[0][:, head] for head in gave[1]]
    groups = heads // mixer.values.shape[1]
    square, reach = 0.0, torch.zeros(batch, dtype=torch.float64)
    for head in range(heads):
        weights = output_weights[head]
        square += float((weights @ value_weights[head // groups]).square().sum())
        moved = mixer.values[:, head // groups].double().cpu() @ weights.mT
        lengths = moved.norm(dim=-1).masked_fill(~mixer.valid_sources.cpu(), 0)
        reach += lengths.amax(-1)
    reach += float(projection[1].norm())
    found.value_norm, found.max_row_norm = square**0.5, reach
    if not _same(into.given, residual):
        found.unlike = "the mixer reads something else than the state that the skip connection adds"
    elif any(bool(values[1][head].any()) for head in read[1]):
        found.unlike = "its values have a bias"
    else:
        found.unlike = "its output has a bias" if bool(projection[1].any()) else ""
    return found


def _same(first: Tensor, other: Tensor) -> bool:
    return first.numel() == other.numel() and torch.equal(first.reshape(other.shape).double(), other.double())


def _columns_of(heads: Tensor, mask: Tensor, tables: Sequence[Tensor]) -> tuple[int, list[list[int]]] | None:
    """Return the table that has the columns of the heads at real tokens, and their positions per head."""
    batch, count, tokens, width = heads.shape
    real = mask.to(heads.device).reshape(-1)
    wanted = heads.permute(0, 2, 1, 3).reshape(batch * tokens, count * width)[real]
    for at, columns in reversed(list(enumerate(tables))):
        if not len(wanted) or columns.numel() != batch * tokens * columns.shape[-1]:
            continue
        table = columns.reshape(batch * tokens, -1)[real]
        # One row tells most tables apart; only then are whole columns compared.
        if table.dtype != heads.dtype or not torch.isin(wanted[0].double(), table[0].double()).all():
            continue
        positions = defaultdict(list)
        for position, column in enumerate(_columns(table)):
            positions[column].append(position)
        # From the end, where the values of a joint projection are; of equal columns each is taken once, and
        # the last of them again: groups of heads may come with their values repeated.
        found = []
        for column in reversed(_columns(wanted)):
            left = positions[column]
            found.append(left.pop() if len(left) > 1 else left[0] if left else -1)
        found.reverse()
        if -1 not in found:
            return at, [found[head * width : (head + 1) * width] for head in range(count)]
    return None


def _columns(table: Tensor) -> list[bytes]:
    numbers = (table.mT.double() + 0.0).cpu().contiguous()  # + 0.0: of the two zeros, the positive one
    return [column.tobytes() for column in numbers.numpy()]
