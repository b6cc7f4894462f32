"""Recommend λ: choose λ for one stack of blocks by trials, and write it into the findings of an audit."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from rankwise._internals.batches import (
    Batch,
    batch_size,
    check_batch,
    drop_unused_labels,
    each_batch,
    first_sequences,
    to_device,
)
from rankwise._internals.forward import device_of, run_model
from rankwise._internals.records import grouped
from rankwise._internals.threads import exclusive
from rankwise.auditing.error_hints import batch_errors
from rankwise.auditing.findings import COLLAPSE_FALL, INACTIVE_TURN, collapse_words, inactive_remedy
from rankwise.auditing.measure import measure_states
from rankwise.auditing.records import SEVERITY_ORDER, Address, Finding, Remedy, StateRecord
from rankwise.auditing.remedies import in_steps
from rankwise.auditing.result import Audit
from rankwise.auditing.statistics import ModelStatistics
from rankwise.errors import InputError, instance_of, one_of
from rankwise.skips.add import check_traceable, skips_of
from rankwise.skips.certify import KEEP_SPREAD, certify_places, check_tokens
from rankwise.skips.hook_places import SkipPlace, check_module, find_places, skip_places
from rankwise.skips.lambda_skip import own_skips
from rankwise.skips.observe import (
    TRIED,
    Lambdas,
    lambdas_of,
    observe,
    places_in,
    plain_skips,
    raise_lambdas,
    with_lambdas,
)
from rankwise.skips.records import LambdaChoice, lambda_words
from rankwise.skips.residual_sums import probe_mode
from rankwise.skips.trial import LossOfModel, fitting_loss
from rankwise.tracing import CapturedState, capture

AuditT = TypeVar("AuditT", bound=Audit)

APART = 0.1
"""Least direction spread that a tried λ must leave after every block. In docs/tutorials/repair-collapse.md a
model does not train with λ = 4, which leaves 0.04, and does with 8, which leaves 0.13."""
SAMPLE = 4
"""Number of sequences that `recommend` examines if a batch is a dict."""
AGAIN = "the model ran again on the first batch"
TRAINS = (
    "λ against COLLAPSE was tried, and a bound of single layers proved, on these sequences alone; nothing is "
    "known about training with it before a trial: rw.skips.try_lambdas, or rankwise skip with --try-steps"
)
BY_HAND = "raise λ in the config or the skip connections of the model, if it has λ"
UNHELPFUL = "nothing that was tried helps: examine the parts between the mixers of the stack"
UNTRIED = "nothing that was tried helps; compare the model to one with pre-norm, by rw.skips.try_lambdas"
TRIAL = Remedy(
    words="train briefly with each λ (add your --lr)", verb="skip", options=[["--try-steps", "100"]],
    code="rw.skips.try_lambdas(lambda: model, batches)",
)  # fmt: skip
"""First step against COLLAPSE if a loss is known: a model may not train with a λ that keeps tokens apart."""
TRIAL_WITH_LOSS = TRIAL.model_copy(update={"code": "rw.skips.try_lambdas(lambda: model, batches, loss=loss)"})
LOAD = Remedy(words="paste the printed `load:` line into your factory")
"""Last step for a model that a factory builds, because λ-skips are written without the model."""


@exclusive
def choose_lambda(model: nn.Module, batch: Batch, stack: str) -> LambdaChoice:
    """Return a choice of λ: the least |λ| of 1, 2, 4, 8 and 16 with which the tokens of a stack stay apart.

    A trial raises every smaller |λ| of the stack to the tried value. The first value is the least |λ| of the
    stack if this is above 1. Tokens stay apart if the direction spread of the batch is at least 0.1, or half
    of its value at the input, after every block (COLLAPSE is below 0.04). Signs of λ are kept; 0 counts as
    positive. The model is not changed. No λ is named if no tried λ keeps tokens apart, or if λ suppresses
    a mixer (INACTIVE_BLOCK). `LambdaChoice.advice` then says what to do. `try_lambdas` shows which λ trains.

    Cost: up to twelve forward passes, two with derivatives if the model has no λ-skips, and ‖M‖_F of the
    mixing matrix of each head.

    Args:
        model: module with λ-skips, with `LambdaSkip`, or with plain residual connections.
        batch: inputs, as in `audit`.
        stack: name of the stack, as in `Finding.where.stack`.

    Raises:
        SkipError: if the model cannot be certified on the batch.
        CaptureError: if the token states of the model are not captured.
        InputError: if the model has no stack of this name.

    Examples:
        >>> import torch, rankwise as rw
        >>> torch.manual_seed(0) and None
        >>> block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
        >>> choice = rw.skips.choose_lambda(model, torch.randn(2, 9, 8), "layers")
        >>> choice.value, choice.removes_collapse
        (1.0, True)
    """
    check_traceable(model)
    check_tokens(batch)
    return _choose(model, batch, stack, *_places_of(model, batch, stack, places_in(model, batch)[0]))


def _places_of(
    model: nn.Module, batch: Batch, stack: str, places: Sequence[SkipPlace]
) -> tuple[Sequence[SkipPlace], list[SkipPlace]]:
    """Return all places, and the places in a stack.

    Plain residual connections are searched if only other stacks have λ-skips.
    """
    if inside := [place for place in places if place.name.startswith(f"{stack}.")]:
        return places, inside
    stacks = {state.stack for state in _states(model, [batch])}
    _check_stack(model, stack, stacks)
    if skip_places(model):
        with plain_skips(model):
            plain, _ = find_places(model, batch)
        if inside := [place for place in plain if place.name.startswith(f"{stack}.")]:
            return plain, inside
    # site names may not begin with the name of the stack: take all places that belong to no other stack
    others = tuple(f"{other}." for other in stacks - {stack})
    return places, [place for place in places if not place.name.startswith(others)]


def _check_stack(model: nn.Module, stack: str, stacks: set[str]) -> None:
    if not stacks:
        fix = "`rw.certify_skip` shows the bounds of single layers."
        raise InputError(f"model {type(model).__name__}", expected="a stack of blocks", got="none", fix=fix)
    one_of("`stack`", stack, stacks)


def _choose(
    model: nn.Module, batch: Batch, stack: str, places: Sequence[SkipPlace], inside: Sequence[SkipPlace]
) -> LambdaChoice:
    """Return the choice of λ for the places `inside` a stack, which are some of all `places` of the model."""
    sites = [place.name for place in inside]
    if not inside:
        return LambdaChoice(
            stack=stack, sites=sites, value=None, removes_collapse=False, tried=[], proved=None,
            mixing_share=math.nan, advice=BY_HAND,
        )  # fmt: skip
    current = lambdas_of(model, inside)
    tried: list[tuple[float, float]] = []
    present = min(float(scale.abs().min()) for scale in current.values())
    for value in sorted({max(value, present) for value in TRIED}):
        with with_lambdas(model, places, raise_lambdas(current, value)):
            removed, lowest = _trial(model, batch, stack)
        tried.append((value, lowest))
        if removed:
            break
    best = tried[-1][0] if removed else max(tried, key=lambda trial: (not math.isnan(trial[1]), trial[1]))[0]
    before = mixing_shares(model, batch, places)
    shares = mixing_shares(model, batch, places, raise_lambdas(current, best))
    suppressed = [site for site in sites if shares[site] < INACTIVE_TURN <= before[site]]
    certificate = certify_places(model, batch, places, KEEP_SPREAD)
    layers = [layer for layer in certificate.layers if layer.site in sites]
    norms = {layer.norm for layer in layers}
    bounds = [
        layer.min_lambda_proved_relative if layer.norm == "none" else layer.min_lambda_proved
        for layer in layers
    ]
    finite = [bound for bound in bounds if bound is not None and math.isfinite(bound)]
    proved = max(finite) if finite and len(finite) == len(bounds) else None
    named, result = removed and not suppressed, f"|λ| = {best:g} removes COLLAPSE"
    if not removed:
        result = f"no |λ| up to {TRIED[-1]:g} keeps the direction spread above {APART:g}, and no λ is named"
    elif suppressed:
        result += f", but suppresses {len(suppressed)} mixers, and no λ is named"
    elif present >= best:
        result = "no COLLAPSE"
    least = "none is known" if proved is None else lambda_words(proved)
    summary = f"Tried on this batch: {result}. Proved to keep half of μ² per layer: {least}."
    return LambdaChoice(
        stack=stack, sites=sites, value=best if named else None, removes_collapse=removed, tried=tried,
        proved=proved, mixing_share=sum(shares[site] for site in sites) / len(sites),
        summary=f"{summary} Nothing is known about training with such a λ." if named else summary,
        advice="" if named else UNTRIED if norms & {"LayerNorm", "RMSNorm"} else UNHELPFUL,
    )  # fmt: skip


def _trial(model: nn.Module, batch: Batch, stack: str) -> tuple[bool, float]:
    """Return whether the tokens of a stack stay apart, and the lowest direction spread after its blocks."""
    records = _states(model, [batch])
    _check_stack(model, stack, {state.stack for state in records})
    states = [state for state in records if state.stack == stack]
    lowest = min((state.direction_spread for state in states if state.blocks), default=math.nan)
    least = min([APART, *(COLLAPSE_FALL * state.direction_spread for state in states if not state.blocks)])
    return not lowest < least, lowest


@exclusive
def recommend(audit: AuditT, model: nn.Module, batch: Batch, loss: LossOfModel | None = None) -> AuditT:
    """Return the audit with a λ in every COLLAPSE finding, and a finding per mixer that λ suppresses.

    `choose_lambda` chooses the λ. The remedy is a command if a command made the audit, otherwise Python. If a
    loss is known and the model has no λ-skips, the remedy begins with a trial of several λ by `try_lambdas`.
    A mixer is reported as INACTIVE_BLOCK if ``mixer_share``, the mean of ‖f(x)‖/‖λx + f(x)‖ over tokens, is
    below 0.01, and no block around the mixer is reported. If the batch is a dict, only its first four
    sequences are examined.
    Cost: nothing without COLLAPSE and λ-skips. Otherwise one forward pass, one more with λ-skips, and up to
    eleven per collapsed stack.

    Args:
        audit: complete audit of this model.
        model: model that was audited.
        batch: inputs that were audited, or some of them.
        loss: loss for the trial, as in `try_lambdas`. By default, labels or next tokens are predicted.

    Raises:
        InputError: if the audit is of another model or incomplete, or the model does not run on the batch.
        SkipError: if the model cannot be certified on the batch, for example if states are not finite.
        CaptureError: if the token states of the model are not captured.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> tokens = torch.randn(2, 9, 8)
        >>> rw.skips.recommend(rw.audit(layer, [tokens]), layer, tokens).findings
        []
    """
    _check(audit, model, batch)
    inputs, _ = drop_unused_labels(model, batch)
    sample = first_sequences(to_device(inputs, device_of(model)), SAMPLE)
    findings = [finding for finding in audit.findings if "mixer_share" not in finding.evidence]
    notes = [note for note in audit.provenance.notes if not note.startswith((AGAIN, TRAINS))]
    collapsed = any(finding.code == "COLLAPSE" for finding in findings)
    built_in = own_skips(model)
    skips = bool(skip_places(model) or built_in)
    if collapsed or skips:
        with batch_errors(model, sample), probe_mode(model), torch.no_grad():
            run_model(model, sample)
        check_traceable(model)
        places, _ = places_in(model, sample)
        purposes = {"suppressed mixers": skips, "λ against COLLAPSE": collapsed}
        purpose = " and ".join(words for words, applies in purposes.items() if applies)
        notes.append(f"{AGAIN}, {batch_size(sample)} sequences, for {purpose}")
    if skips:
        blocks = [f"{finding.where.site}." for finding in findings if finding.code == "INACTIVE_BLOCK"]
        scaled = places
        if not skip_places(model):
            scaled = [place for place in places if place.block in built_in]
        for site, share in mixing_shares(model, sample, scaled).items():
            if share >= INACTIVE_TURN or f"{site}.".startswith(tuple(blocks)):
                continue
            effect = f"its output is {share:.1g} of the sum with its skip connection"
            meaning = f"The mixer at {site} barely changes its tokens: {effect}."
            suppressed = Finding(
                code="INACTIVE_BLOCK", severity="warning", where=Address(site=site), meaning=meaning,
                evidence={"mixer_share": share},
                remedy=inactive_remedy("set the weights of its output projection to 0"),
            )  # fmt: skip
            findings.append(suppressed)
    if collapsed:
        findings = [
            advise_lambda(finding, model, sample, places) if finding.code == "COLLAPSE" else finding
            for finding in findings
        ]
        trial = None
        if loss is not None and not skips:
            trial = TRIAL_WITH_LOSS
        elif not skips:
            with suppress(InputError), probe_mode(model):  # without a loss there is no trial
                fitting_loss(model, [to_device(batch, device_of(model))])
                trial = TRIAL
        of_factory = any(".py:" in words[0] for words in audit.provenance.arguments[:1])
        for index, finding in enumerate(findings):
            remedy = finding.remedy
            if finding.code == "COLLAPSE" and remedy is not None and remedy.verb == "skip":
                before = [] if trial is None else [trial]
                if before:
                    remedy = remedy.model_copy(update={"words": f"or {remedy.words}"})
                steps = in_steps([*before, remedy, *([LOAD] if of_factory else [])])
                findings[index] = finding.model_copy(update={"remedy": steps})
        if any("lambda_tried" in finding.evidence for finding in findings):
            notes.append(TRAINS)
    about = audit.provenance.model_copy(update={"notes": notes})
    ordered = sorted(findings, key=lambda finding: SEVERITY_ORDER[finding.severity])
    return audit.model_copy(update={"findings": ordered, "provenance": about})


@exclusive
def direction_spread_by_layer(model: nn.Module, batches: Iterable[Batch]) -> dict[str, list[float]]:
    """Return the mean direction spread per stack: before its first block, and after each block.

    Examples:
        >>> block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        >>> len(direction_spread_by_layer(model, [torch.randn(1, 5, 8)])["layers"])
        3
    """
    check_module(model)
    ordered = sorted(_states(model, batches), key=lambda state: (state.stack, state.blocks))
    stacks = grouped(ordered, lambda state: state.stack)
    return {stack: [state.direction_spread for state in states] for stack, states in stacks.items()}


def _states(model: nn.Module, batches: Iterable[Batch]) -> list[StateRecord]:
    """Return the records of token states that an audit would have for these batches, without ranks."""
    statistics = ModelStatistics()

    def note(state: CapturedState) -> None:
        statistics.add_states(measure_states(state, None, ranks=False))

    with probe_mode(model), torch.no_grad(), capture(model, on_mixer=lambda _: None, on_state=note):
        for batch in each_batch(batches):
            with batch_errors(model, batch):
                run_model(model, batch)
    return [states.to_record() for states in statistics.states.values()]


def advise_lambda(finding: Finding, model: nn.Module, batch: Batch, places: Sequence[SkipPlace]) -> Finding:
    """Return a COLLAPSE finding with the chosen λ in its evidence, meaning and remedy."""
    stack = finding.where.stack
    places, inside = _places_of(model, batch, stack, places)
    choice = _choose(model, batch, stack, places, inside)
    if not inside:
        return finding.model_copy(update={"remedy": Remedy(words=choice.advice)})
    numbers = {
        "mixing_share": choice.mixing_share,
        "direction_spread_lowest_tried": max(lowest for _, lowest in choice.tried),
        "lambda_tried": choice.value,
        "lambda_proved": choice.proved,
    }
    evidence = {name: value for name, value in numbers.items() if value is not None}
    meaning = f"{collapse_words(finding.evidence)} {choice.summary}"
    remedy = _remedy(model, choice, places)
    update = {"evidence": finding.evidence | evidence, "meaning": meaning, "remedy": remedy}
    return finding.model_copy(update=update)


def _remedy(model: nn.Module, choice: LambdaChoice, places: Sequence[SkipPlace]) -> Remedy:
    """Return the remedy for COLLAPSE: add the chosen λ, or raise every smaller |λ| in the stack to its value.

    Return the advice alone if no λ is named. If no |λ| is smaller, request a batch that collapses.
    """
    if choice.value is None:
        return Remedy(words=choice.advice)
    current = lambdas_of(model, places)
    below = {name: current[name] for name in choice.sites if bool((current[name].abs() < choice.value).any())}
    if not below:
        code = f"rw.skips.choose_lambda(model, batch, {choice.stack!r})"
        return Remedy(words="pass a batch that collapses", code=code)
    value, modules = choice.value, own_skips(model)
    blocks = {place.name: place.block for place in places}
    built_in = {blocks[name]: modules[blocks[name]] for name in below if blocks[name] in modules}
    skips = skips_of(model)
    learned = [f"{block}.weight" for block, skip in built_in.items() if skip.weight is not None]
    if present := learned or [f"rw.skips.skips_of(model)[{name!r}].data" for name in below if name in skips]:
        more = f" and {len(present) - 1} more" if present[1:] else ""
        return Remedy(words=f"raise |λ| below {value:g} to {value:g}, with its sign, in `{present[0]}`{more}")
    if built_in:
        first = next(iter(built_in.values()))
        fixed = '"skip": "fixed", ' if first.kind == "none" else ""
        sign = -1 if first.kind == "fixed" and first.init < 0 else 1
        entry = f'{fixed}"skip_init": {sign * value:g}'
        return Remedy(words=f"put `{entry}` into the config.json of the model")
    # without names of sites, the remedy would add λ to other stacks
    in_stack = all(name.startswith(f"{choice.stack}.") for name in below)
    named = [] if len(below) == len(places) else [choice.stack] if in_stack else list(below)
    arguments = [f"init={value:g}", *([f"sites={named}"] if named else []), "example=batch"]
    if any(scale.numel() > 1 for scale in skips.values()):
        arguments.insert(-1, 'per="channel"')
    return Remedy(
        words="add the smallest λ that keeps tokens apart", verb="skip", out="skips",
        options=[["--lambda", f"{value:g}"], *(["--sites", name] for name in named)],
        code=f"rw.add_lambda_skip(model, {', '.join(arguments)})",
    )  # fmt: skip


def mixing_shares(
    model: nn.Module, batch: Batch, places: Sequence[SkipPlace], lambdas: Lambdas | None = None
) -> dict[str, float]:
    """Return the mean of ‖f(x)‖/‖λx + f(x)‖ for each site. For repeated calls, return the largest mean."""
    shares: dict[str, float] = {}
    for skip in observe(model, batch, places, lambdas or {}):
        size, whole = (torch.linalg.vector_norm(x.double(), dim=-1) for x in (skip.branch, skip.total))
        share = float((size / whole)[skip.mask].mean())
        shares[skip.place.name] = max(share, shares.get(skip.place.name, 0.0))
    return shares


def _check(audit: Any, model: object, batch: Any) -> None:
    fix = "Pass the result of `rw.audit(model, batches)`, or `rw.Audit.load(path)`."
    instance_of("`audit`", audit, Audit, "an audit", fix=fix)
    instance_of("`model`", model, nn.Module, "a torch.nn.Module", fix="Pass the model that was audited.")
    check_batch(batch)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if audit.provenance.model_class not in ("", kind):
        got, fix = f"one of a {audit.provenance.model_class}", "Pass the model that was audited."
        raise InputError("`audit`", expected=f"an audit of a {kind}", got=got, fix=fix)
    if not audit.complete:
        got, fix = "one that was stopped", "Audit the model again."
        raise InputError("`audit`", expected="a complete audit", got=got, fix=fix)
