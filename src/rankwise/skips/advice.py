"""Recommend λ against a collapse, and find mixers that skip connections drown."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rankwise._internals.forward import (
    Batch,
    batch_size,
    device_of,
    drop_unused_labels,
    first_sequences,
    run_model,
    tensors_of,
    to_device,
)
from rankwise.auditing.error_hints import fix_hint
from rankwise.auditing.findings import INACTIVE_TURN, RULES
from rankwise.auditing.records import SEVERITY_ORDER, Finding, HeadId
from rankwise.auditing.result import Audit
from rankwise.errors import InputError, RankwiseError
from rankwise.skips.certify import NoResidualError, certify_skip
from rankwise.skips.own_skips import own_skips, with_own_remedy
from rankwise.skips.probe import check_traceable, find_skip_locations, probing
from rankwise.skips.remedy import KEEP, collapse_with, with_remedy
from rankwise.skips.skip_sums import skip_sums
from rankwise.skips.skips import name_sites, skips_of
from rankwise.skips.verify import unhooked

AuditT = TypeVar("AuditT", bound=Audit)

SAMPLE = 4
"""Sequences of a dict that are looked at."""
LAYER_SCALES = re.compile(r"layer_?scale|lambda_?[12]$|gamma_?[12]$", re.IGNORECASE)
"""Names of LayerScale's parameters, where no module of that name holds them."""
NOT_CAPTURED = "not known whether λ or LayerScale drowns single mixers"
UNNAMED = "no λ is named for COLLAPSE"
UNTRIED = "not known whether λ = 1 is enough against COLLAPSE"
AGAIN = "the model ran again on the first batch"
BY_HAND = "raise λ in the model's own config or skip connections, where it has one"
"""What fails to certify a model mostly keeps `rankwise skip` from it, too."""


def recommend(
    audit: AuditT,
    model: nn.Module,
    batch: Batch,
    on_progress: Callable[[str], None] | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> AuditT:
    """Add to an audit what takes another look at the skip connections of its model.

    To every COLLAPSE the λ that each bound asks for, and the command that puts it in, or words where none can
    be told. No bound is known where a ToST model has a λ of its own that is not 1 (`ToSTConfig.skip`): there
    the least |λ| of 1, 2, 4 and 8 is named with which an audit finds no COLLAPSE, and where it stands.

    An INACTIVE_BLOCK for each mixer that a λ-skip or LayerScale drowns in a block that is otherwise active:
    its share, the mean over tokens of ‖b‖/‖λy + b‖ with b what the mixer adds to its state y, is below 0.01.
    Of a dict the first four sequences are looked at, of any other batch all.

    The model runs in evaluation mode. LayerScale that is closed (all 0) is opened for one pass and closed
    again; parameters, buffers, modes and random state are afterwards what they were.

    Range: `mixer_share` in [0, ∞), λ in (0, ∞).
    Cost: nothing without a COLLAPSE, λ-skips and LayerScale; else one forward pass, about 25 more for a
    COLLAPSE, and an audit where a λ is below 1 (of a ToST model's own λ up to four audits alone), one for
    λ-skips, and for LayerScale a backward pass more.

    Args:
        audit: of this model; it is not changed.
        model: what was audited.
        batch: what it was audited on, or part of it, as `audit` takes it.
        on_progress: called with what is looked at next.
        on_failure: called with what could not be told, and why, in place of an error: the audit then has a
            note of it and is not marked as advised. By default an error is raised.

    Returns:
        The audit with these findings, the gravest first.

    Raises:
        InputError: if the audit is none, is not complete or is that of a model of another class, or the model
            does not run on the batch.
        SkipError: if what the model gives on the batch cannot be certified, such as states that are not
            finite. A model without residual connections is none: its COLLAPSE gets a remedy in words.

    Source: `certify_skip` for the bounds.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> tokens = torch.randn(2, 9, 8)
        >>> rw.skips.recommend(rw.audit(layer, [tokens]), layer, tokens).provenance.advised
        True
    """
    _check(audit, model, batch)
    looked_at: list[str] = []

    def say(what: str) -> None:
        looked_at.append(what)
        if on_progress is not None:
            on_progress(what)

    failures: list[str] = []

    def failed(what: str, error: Exception) -> None:
        if on_failure is None:
            raise error
        failures.append(f"{what}: {_said(error)}")
        on_failure(failures[-1])

    sample = first_sequences(to_device(drop_unused_labels(model, batch)[0], device_of(model)), SAMPLE)
    found = [finding for finding in audit.findings if "mixer_share" not in finding.evidence]
    notes = [
        note
        for note in audit.provenance.notes
        if not note.startswith((NOT_CAPTURED, UNNAMED, UNTRIED, AGAIN))
    ]
    if skips_of(model) or _layer_scales(model):
        try:
            _check_runs(model, sample)
            found += _drowned(found, model, sample, say)
        except Exception as error:
            failed(NOT_CAPTURED, error)
    if any(finding.code == "COLLAPSE" for finding in found):
        try:
            _check_runs(model, sample)
            own = own_skips(model)
            if own:
                found = [
                    with_own_remedy(each, model, own, sample, say) if each.code == "COLLAPSE" else each
                    for each in found
                ]
            else:
                say("the certificate of a collapse")
                found = _named(found, model, sample, say, notes)
        except NoResidualError as error:  # that is the answer
            notes.append(f"{UNNAMED}: {error}")
            found = _by_hand(found)
        except Exception as error:
            failed(UNNAMED, error)
            found = _by_hand(found)
    notes += failures
    if looked_at:
        notes.append(f"{AGAIN}, {batch_size(sample)} sequences, for {' and '.join(looked_at)}")
    about = audit.provenance.model_copy(update={"advised": not failures, "notes": notes})
    ordered = sorted(found, key=lambda finding: SEVERITY_ORDER[finding.severity])
    return audit.model_copy(update={"findings": ordered, "provenance": about})


def _check(audit: object, model: object, batch: object) -> None:
    wrong = _wrong(audit, model, batch)
    if wrong is not None:
        raise wrong
    assert isinstance(audit, Audit)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if audit.provenance.model_class not in ("", kind):
        raise InputError(
            "`audit`",
            expected=f"an audit of a {kind}",
            got=f"one of a {audit.provenance.model_class}",
            fix="Pass the model that was audited.",
        )
    if not audit.complete:
        raise InputError(
            "`audit`", expected="a complete audit", got="one that was stopped", fix="Audit the model again."
        )


def _wrong(audit: object, model: object, batch: object) -> InputError | None:
    """Arguments that are something else altogether, and what to pass in their stead."""
    if not isinstance(audit, Audit):
        fix = "Pass what `rw.audit(model, batches)` gave, or `rw.Audit.load(path)`."
        return InputError("`audit`", expected="an audit", got=_kind(audit), fix=fix)
    if not isinstance(model, nn.Module):
        fix = "Pass the model that was audited."
        return InputError("`model`", expected="a torch.nn.Module", got=_kind(model), fix=fix)
    if not isinstance(batch, Mapping | tuple | list | Tensor) or not tensors_of(batch):
        fix = "Pass one of the batches that were audited: a dict of tensors, a tuple of tensors or a tensor."
        return InputError("`batch`", expected="a batch", got=_kind(batch), fix=fix)
    return None


def _kind(value: object) -> str:
    inside = f" of {type(value[0]).__name__}" if isinstance(value, tuple | list) and value else ""
    return f"{type(value).__name__}{inside}"


def _check_runs(model: nn.Module, batch: Batch) -> None:
    """What fails later, on a batch that the model takes, is not the fault of the batch."""
    try:
        with probing(model), torch.no_grad():
            run_model(model, batch)
    except Exception as error:
        if isinstance(error, RankwiseError):
            raise
        name, got = type(model).__name__, f"{type(error).__name__}: {error}"
        raise InputError(
            "`batch`", expected=f"a batch that {name} runs on", got=got, fix=fix_hint(model, batch, error)
        ) from error


def _said(error: Exception) -> str:
    """Of a KeyError or a MemoryError the text alone says little or nothing."""
    return str(error) if isinstance(error, RankwiseError | RuntimeError) else repr(error)


def _drowned(
    findings: Sequence[Finding], model: nn.Module, batch: Any, say: Callable[[str], None]
) -> list[Finding]:
    say("mixers that a λ-skip or LayerScale drowns")
    return [
        _drowned_mixer(site, share)
        for site, share in _shares(model, batch).items()
        if share < INACTIVE_TURN and not _inside_switched_off(site, findings)
    ]


def _drowned_mixer(site: str, share: float) -> Finding:
    """A mixer that adds next to nothing to its skip connection, whatever else its block does."""
    return Finding(
        code="INACTIVE_BLOCK",
        severity="warning",
        where=HeadId(site=site),
        evidence={"mixer_share": share},
        meaning=f"The mixer at {site or 'the model itself'} adds hardly anything to its tokens: "
        f"{share:.1g} of what its skip connection gives.",
        remedy=RULES["INACTIVE_BLOCK"].remedy.format(change="set the weights of its output projection to 0"),
    )


def _named(
    findings: Sequence[Finding], model: nn.Module, batch: Any, say: Callable[[str], None], notes: list[str]
) -> list[Finding]:
    layers, carries = certify_skip(model, batch, KEEP).layers, bool(skips_of(model))

    def tried(stack: str, scales: Mapping[str, float]) -> Finding | None:
        say("an audit with λ = 1")
        return collapse_with(model, batch, stack, scales, lambda reason: notes.append(f"{UNTRIED}: {reason}"))

    return [
        with_remedy(finding, layers, carries, partial(tried, finding.where.stack))
        if finding.code == "COLLAPSE"
        else finding
        for finding in findings
    ]


def _by_hand(findings: Sequence[Finding]) -> list[Finding]:
    remedy = {"remedy": BY_HAND}
    return [each.model_copy(update=remedy) if each.code == "COLLAPSE" else each for each in findings]


def _inside_switched_off(site: str, findings: Sequence[Finding]) -> bool:
    blocks = [finding.where.site for finding in findings if finding.code == "INACTIVE_BLOCK"]
    return any(f"{site}.".startswith(f"{block}.") for block in blocks)


def _shares(model: nn.Module, batch: Any) -> Mapping[str, float]:
    """Mean ‖b‖/‖λy + b‖ of a token by site, b what the mixer adds; none without λ-skips and LayerScale."""
    skips, layer_scales = skips_of(model), _layer_scales(model)
    if not skips and not layer_scales:
        return {}
    check_traceable(model)
    sites = list(skips.sites.values())
    if layer_scales:
        with unhooked(model), _open(layer_scales):
            sites = name_sites(find_skip_locations(model, batch)[0])
    scales = {site.name: skips[site.name].detach() if site.name in skips else 1.0 for site in sites}
    shares: dict[str, float] = {}
    for added in skip_sums(model, batch, sites, scales) if sites else ():
        branch, total = (torch.linalg.vector_norm(x.double(), dim=-1) for x in (added.branch, added.total))
        share = float((branch / total)[added.mask].mean())
        shares[added.site.name] = max(
            share, shares.get(added.site.name, 0.0)
        )  # of several calls one is enough
    return shares


def _layer_scales(model: nn.Module) -> list[Tensor]:
    return [
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "LayerScale" in type(module).__name__ or LAYER_SCALES.search(name)
    ]


@contextmanager
def _open(layer_scales: Sequence[Tensor]) -> Iterator[None]:
    """At 0, no derivative shows that it scales a mixer."""
    closed = [(scale, scale.detach().clone()) for scale in layer_scales if not bool(scale.any())]
    try:
        for scale, _ in closed:
            scale.data.fill_(1)
        yield
    finally:
        for scale, before in closed:
            scale.data.copy_(before)  # a zero has a sign
