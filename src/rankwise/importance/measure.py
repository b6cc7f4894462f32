"""What every head, every block and a set of heads are worth."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rankwise._internals.forward import Batch, device_of, run_model, to_device
from rankwise._internals.statistics import spearman
from rankwise.errors import InputError
from rankwise.importance.choice import choose_loss
from rankwise.importance.joint import Together, search
from rankwise.importance.losses import Case
from rankwise.importance.results import (
    BlockImportance,
    Estimates,
    HeadPlace,
    Importance,
    Removal,
    SiteImportance,
)
from rankwise.importance.runs import CalledSite, NotDifferentiableError, Runs, named
from rankwise.importance.settings import ImportanceSettings
from rankwise.tracing import CallId, SiteAdapter, StateSite, capture

UNGATED = "its operator was read from inputs and weights; what its heads give is seen nowhere"
TRAINING = "the model is in training mode: where it drops at random, so do its losses; call model.eval()"
UNREACHED = "no gradient, or not the whole of it, reached it"


@dataclass
class _Session:
    """A model, its batches and its loss, its places known."""

    runs: Runs
    blocks: dict[str, tuple[str, int]]
    """Stack and layer of each block, by its name."""
    settings: ImportanceSettings
    say: Callable[[str], None]
    channels: Callable[[SiteImportance], Sequence[int]]
    notes: list[str] = field(default_factory=list)


def measure_importance(
    model: nn.Module,
    batches: Iterable[Batch],
    settings: ImportanceSettings | None = None,
    *,
    sites: Mapping[str, SiteAdapter] | None = None,
    blocks: str | None = None,
    readable: Callable[[Batch], Batch] | None = None,
    channels: Callable[[SiteImportance], Sequence[int]] | None = None,
    together: Together | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Importance:
    r"""What the model loses without each head, each block, and the largest set of heads that can go.

    Formula: a gate ξ_h = 1 on what each head gives, ξ M V; where its mean m takes its place,
    ξ M V + (1 − ξ) m. With S_i the loss of sequence i summed over its N_i tokens, N = Σ N_i and L = Σ S_i /
    N: gradient ∂L/∂ξ_h; first order Σ_i |∂S_i/∂ξ_h| / N (Michel et al.); Fisher ½ Σ_i (∂S_i/∂ξ_h)² / N;
    curvature ½ J_hᵀ (diag p − p pᵀ) J_h / N of the logits' Jacobian J, of states ‖J_h‖² / ‖Y‖², its
    expectation over random projections. Removal is ξ_h from 1 to 0, to second order ``curvature − gradient``;
    of a loss that is how far the output moves the gradient is 0, and the curvature is all there is.
    Range: costs are of the loss's unit; below 0 the model is better without the head.
    Cost: one run of the first batch, then for each batch a forward pass with gradients and ``1 + probes``
    backward passes, whatever the number of heads; exact as many forward passes as there are heads and blocks;
    the set log2 of the heads and at most 16 more.
    Source: Michel, Levy, Neubig, "Are Sixteen Heads Really Better than One?", 2019; second order as LeCun,
    Denker, Solla, "Optimal Brain Damage", 1990.

    Args:
        model: any `torch.nn.Module`; nothing of it is written to, no hook stays.
        batches: dicts, tuples or tensors; kept in a list, as they run more than once.
        settings: how.
        sites: as in `rankwise.capture`.
        blocks: as in `rankwise.capture`.
        readable: from a batch to what the model takes of it; the rest may be labels.
        channels: of a mixer the heads that exact removes; all without.
        together: heads with the same key are in the joint set together or not at all; those with None stay.
        on_progress: told what is being done.

    Raises:
        InputError: if the loss does not fit, is nowhere finite, or there is nothing to compare.
        NotDifferentiableError: if no gradient reaches the heads; ``estimates=False, exact=True`` needs none.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> worth = measure_worth(layer, [torch.randn(2, 5, 8)], ImportanceSettings(exact=True))
        >>> worth.loss, worth.sites[0].exact.shape
        ('relative squared change of the output', (2,))
    """
    chosen, every = settings or ImportanceSettings(), list(batches)
    capturing: dict[str, Any] = {"sites": sites, "blocks": blocks}
    session = _begin(model, every, chosen, capturing, readable, channels, on_progress)
    mean = chosen.removal == "mean"
    if mean:
        session.runs.note_means()
    try:
        session.runs.whole(session.blocks, chosen.probes, chosen.seed, gradients=chosen.estimates, mean=mean)
    except NotDifferentiableError as error:
        if not chosen.exact:
            raise
        chosen = replace(chosen, estimates=False)
        session = _begin(model, every, chosen, capturing, readable, channels, on_progress)
        session.notes.append(f"worth without estimates: no gradients flow ({error.got})")
        if mean:
            session.runs.note_means()
        session.runs.whole((), 0, 0, gradients=False)
    runs = session.runs
    measured = [_site(session, key, placed) for key, placed in runs.sites.items()]
    for placed in runs.ungated:
        measured.append(_site_importance(placed, _unknown(placed.heads), UNGATED))
    unreached = [site.site for site in measured if site.why_not == UNREACHED]
    if unreached:
        session.notes.append(f"no estimates of {named(unreached)}: {UNREACHED.removesuffix(' it')} them")
    for site in measured:
        if chosen.exact and site.why_not == UNREACHED:
            site.why_not = ""  # it will be known by removal
    standing = [_block(session, name) for name in session.blocks]
    importance = Importance(
        loss=runs.loss.name,
        unit=runs.loss.unit,
        value=runs.value,
        reference=runs.reference,
        reference_name=runs.loss.reference,
        sequences=runs.sequences,
        nonfinite=runs.nonfinite,
        counted=runs.count,
        removal=chosen.removal,
        probes=runs.probes_of(chosen.probes) if chosen.estimates else 0,
        seed=chosen.seed,
        sites=measured,
        blocks=standing,
        notes=session.notes,
    )
    try:
        if chosen.exact:
            _exactly(session, importance)
        if chosen.tolerance is not None:
            keys = {site.place(0)[:5]: key for key, site in zip(runs.sites, measured, strict=False)}
            importance.joint = search(runs, importance, keys, chosen, session.say, together)
    except KeyboardInterrupt:
        importance.notes.append("interrupted from the keyboard: not all removals were run")
    known = [site for site in measured if not site.why_not]
    if known:
        estimated = np.concatenate([site.estimates.removal for site in known])
        importance.spearman = spearman(estimated, np.concatenate([site.exact for site in known]))
    importance.forward, importance.backward = runs.forward, runs.backward
    return importance


def ablation_cost(
    model: nn.Module,
    batches: Iterable[Batch],
    heads: Iterable[HeadPlace],
    settings: ImportanceSettings | None = None,
    *,
    sites: Mapping[str, SiteAdapter] | None = None,
    blocks: str | None = None,
    readable: Callable[[Batch], Batch] | None = None,
) -> Removal:
    """What the model loses on some batches without a set of heads, by running it without them.

    Cost: three forward passes, and one more for means.

    Args:
        model: any `torch.nn.Module`.
        batches: as in `measure_worth`; others than the heads were chosen on show whether the choice holds.
        heads: which, as `Worth.joint` names them.
        settings: the loss, and what takes their place.
        sites: as in `rankwise.capture`.
        blocks: as in `rankwise.capture`.
        readable: as in `measure_worth`.

    Raises:
        InputError: if the model has no such head, or as in `measure_worth`.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> worth = measure_worth(layer, [torch.randn(2, 5, 8)])
        >>> gone = ablation_cost(layer, [torch.randn(2, 5, 8)], [worth.sites[0].place(1)])
        >>> gone.cost > 0
        True
    """
    wanted = tuple(heads)
    capturing: dict[str, Any] = {"sites": sites, "blocks": blocks}
    session = _begin(model, list(batches), settings or ImportanceSettings(), capturing, readable, None, None)
    runs = session.runs
    if session.settings.removal == "mean":
        runs.note_means()
    runs.whole((), 0, 0, gradients=False)
    chosen: dict[CallId, list[int]] = {}
    places = {placed[:5]: (key, placed.heads) for key, placed in runs.sites.items()}
    for head in wanted:
        key, many = places.get(head[:5], (None, 0))
        if key is None or not 0 <= head.head < many:
            raise InputError(
                f"head {head.head} of {head.site!r}", expected="a head that is there and can be gated",
                got="none", fix=f"Mixers with gates: {', '.join(place[2] for place in places) or 'none'}.",
            )  # fmt: skip
        chosen.setdefault(key, []).append(head.head)
    loss, _ = runs.without(chosen, session.settings.removal == "mean")
    return removal_of(runs, wanted, loss)


def removal_of(runs: Runs, heads: tuple[HeadPlace, ...], loss: float) -> Removal:
    """A loss without some heads beside that of the whole model.

    Args:
        runs: of the whole model.
        heads: which.
        loss: without them.
    """
    cost = loss - runs.value
    return Removal(heads, loss, cost, cost / runs.reference if runs.reference else math.nan)


def _begin(
    model: nn.Module,
    every: Sequence[Batch],
    settings: ImportanceSettings,
    capturing: dict[str, Any],
    readable: Callable[[Batch], Batch] | None,
    channels: Callable[[SiteImportance], Sequence[int]] | None,
    on_progress: Callable[[str], None] | None,
) -> _Session:
    if not every:
        raise InputError(
            "`batches`", expected="at least one batch", got="none",
            fix="Pass a list of batches; an exhausted iterator gives none.",
        )  # fmt: skip
    say = on_progress or (lambda what: None)
    say("the first batch, to see its output")
    taken = [batch if readable is None else readable(batch) for batch in every]
    states: list[tuple[str, int, str]] = []

    def note(state: StateSite) -> None:
        states.append((state.stack, state.layer, state.name))

    with torch.no_grad(), capture(model, on_mixer=lambda site: None, on_state=note, **capturing):
        output = run_model(model, to_device(taken[0], device_of(model)))
    chosen = choose_loss(
        model,
        Case(taken[0], every[0]),
        output,
        settings.loss,
        mask_token=settings.mask_token,
        seed=settings.seed,
    )
    notes = [TRAINING] if model.training else []
    both = enumerate(zip(taken, every, strict=True))
    cases = [chosen.case(batch, given, number) for number, (batch, given) in both]
    chosen.check(cases, output)
    del output
    # what a block wrote is the state after it; where the last state is missing, blocks do not add to a stream
    standing = {name: (stack, layer - 1) for stack, layer, name in states if layer > 0}
    runs = Runs(model, cases, chosen, capturing, say)
    runs.forward += 1
    every_head = channels or (lambda site: range(site.estimates.heads))
    return _Session(runs, standing, settings, say, every_head, notes)


def _site(session: _Session, key: CallId, placed: CalledSite) -> SiteImportance:
    sums, runs = session.runs.heads.get(key), session.runs
    estimates, why_not = _unknown(placed.heads), ""
    if session.settings.estimates and (sums is None or sums.lost):
        why_not = UNREACHED
    elif sums is not None:
        estimates = sums.estimates(runs.loss, runs.count, runs.probes_of(session.settings.probes))
    return _site_importance(placed, estimates, why_not)


def _site_importance(placed: CalledSite, estimates: Estimates, why_not: str) -> SiteImportance:
    stack, layer, site, cross, occurrence, kind, heads = placed
    exact, cosine = np.full(heads, math.nan), np.full(heads, math.nan)
    return SiteImportance(stack, layer, site, cross, occurrence, kind, estimates, exact, cosine, why_not)


def _block(session: _Session, name: str) -> BlockImportance:
    stack, layer = session.blocks[name]
    runs = session.runs
    calls = [sums for key, sums in runs.blocks.items() if key.module == name]
    if not session.settings.estimates:
        return BlockImportance(stack, layer, name, _unknown(1))
    if not calls or any(sums.lost for sums in calls):
        return BlockImportance(stack, layer, name, _unknown(1), why_not=UNREACHED)
    probes = runs.probes_of(session.settings.probes)
    return BlockImportance(stack, layer, name, calls[0].estimates(runs.loss, runs.count, probes))


def _exactly(session: _Session, importance: Importance) -> None:
    """Remove heads and blocks one by one."""
    runs, mean = session.runs, session.settings.removal == "mean"
    gated = list(zip(runs.sites, importance.sites, strict=False))
    chosen = [(key, site, head) for key, site in gated for head in session.channels(site)]
    for done, (key, site, head) in enumerate(chosen):
        session.say(f"without head {done + 1} of {len(chosen)}: {site.site}")
        loss, site.cosine[head] = runs.without({key: [head]}, mean)
        site.exact[head] = loss - runs.value
    for block in importance.blocks:
        session.say(f"without the block {block.site}")
        block.exact = runs.without({}, blocks=[block.site])[0] - runs.value


def _unknown(heads: int) -> Estimates:
    return Estimates(*(np.full(heads, math.nan) for _ in range(5)))
