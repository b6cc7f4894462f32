"""Remedies of findings: build them, join them, and render them as a command or Python code."""

import json
import math
import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rankwise._internals.files import folder_name
from rankwise.auditing.records import Provenance, Remedy
from rankwise.importance.records import ImportanceRecord

WORTH = 0.05
"""Smallest share of the parameters whose removal is recommended. Removing a smaller share changes the speed
by less than the noise of time measurements."""
LINEAR = "queries, keys and values come from nn.Linear layers"
"""Condition of all parts of `rankwise.compress`."""
COMMANDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "--text", "--dataset", "--tokens", "--batch-size", "--device", "--dtype", "--trust-remote-code",
        ),
        ("compress", "skip"),
    ),
    "--images": ("compress",),
    "--tokenizer": (),
    "--device-map": (),
    "--offload-folder": (),
}  # fmt: skip
"""Options of `rankwise audit` for model, data or device, each with the other commands that have it."""

EXTRA = ("--at-init", "--attention-maps")
"""Options for measurements that another audit need not repeat."""

WITHOUT_HEAD = Remedy(
    words="see what the model loses without it", verb="audit", options=[["--importance"]], out="importance",
    code="rw.audit(model, batches, importance=True)",
)  # fmt: skip
EXACTLY = Remedy(
    words="remove heads one by one", verb="audit", options=[["--importance", "exact"]], out="exact",
    code='rw.audit(model, batches, importance="exact")',
)  # fmt: skip


def remedy_text(remedy: Remedy, about: Provenance | None = None) -> str:
    """Return a remedy as text with code in backticks: one line, or a numbered line per step.

    If a command made the audit, the code is a command with the same model, data and device. Otherwise, or if
    the suggested command lacks an option of the audit, the code is Python.

    Examples:
        >>> remedy_text(Remedy(words="use float32", verb="audit", code="rw.audit(model.float(), batches)"))
        'use float32: `rw.audit(model.float(), batches)`'
    """
    steps = [_step_text(step, about) for step in (remedy, *remedy.then)]
    if len(steps) == 1:
        return steps[0]
    return "\n".join(f"{number}. {text[0].upper()}{text[1:]}." for number, text in enumerate(steps, 1))


def _step_text(step: Remedy, about: Provenance | None) -> str:
    code = step_code(step, about)
    text = ": ".join(filter(None, (step.words, code and f"`{code}`")))
    text += f", if {step.condition}" if step.condition else ""
    if not step.no_action:
        return text
    return f"No action recommended: {step.no_action}" + (f". To do it anyway, {text}" if text else "")


def step_code(step: Remedy, about: Provenance | None) -> str:
    """Return the code of one step: a command for the model and data of the audit, or Python code."""
    if about is None or not about.arguments or not step.verb:
        return step.code
    model, new = about.arguments[0][0], {name for name, *_ in step.options}
    given = [option for option in about.arguments[1:] if option[0] not in {*new, *EXTRA}]
    if step.verb != "audit":
        given = [option for option in given if option[0] in COMMANDS]
        if about.part or any(step.verb not in COMMANDS[option[0]] for option in given):
            return step.code
    written = [["--out", f"{folder_name(Path(model).name)}-{step.out}"]] if step.out else []
    return shlex.join(["rankwise", step.verb, model, *chain(*given, *step.options, *written)])


def in_steps(steps: Sequence[Remedy]) -> Remedy:
    """Return one remedy for several steps, which readers follow in order."""
    first, *others = steps
    return first.model_copy(update={"then": others})


def unless_done(remedy: Remedy, about: Provenance | None) -> Remedy:
    """Return the remedy. If it repeats the audit that was just made, return a remedy without action."""
    given = [] if about is None else about.arguments
    repeated = [any(words[: len(option)] == option for words in given) for option in remedy.options]
    if remedy.verb != "audit" or not repeated or not all(repeated):
        return remedy
    return Remedy(no_action=f"this audit ran with {shlex.join(chain(*remedy.options))} already")


def unless_too_little(remedy: Remedy, saved: float) -> Remedy:
    """Return the remedy, with no action recommended if the share ``saved`` is below `WORTH`."""
    reason = f"the savings are too small to notice ({saved:.1%})" if saved < WORTH else ""
    return remedy.model_copy(update={"no_action": reason})


def compress_remedy(parts: Sequence[str], tolerance: str, words: str, out: str, saves: float) -> Remedy:
    """Return the remedy that compresses parts of the model."""
    listed = json.dumps(parts[0] if len(parts) == 1 else list(parts))
    return Remedy(
        words=words, verb="compress", options=[["--parts", ",".join(parts)], ["--tolerance", tolerance]],
        out=out, code=f"rw.compress(model, batches, parts={listed}, tolerance={tolerance})", saves=saves,
        condition=LINEAR,
    )  # fmt: skip


def join_compressions(remedies: Sequence[Remedy]) -> Remedy:
    """Return one remedy that compresses the parts of all these remedies, with the tolerance of the first."""
    first, *others = remedies
    if not others:
        return first
    options = [dict(remedy.options) for remedy in remedies]
    parts = [*dict.fromkeys(option["--parts"] for option in options)]
    words = "; ".join(dict.fromkeys(remedy.words for remedy in remedies))
    return compress_remedy(parts, options[0]["--tolerance"], words, first.out, math.nan)


def removal_remedy(
    importance: ImportanceRecord, saves: float, costs: float, tolerance: float, price: str = ""
) -> Remedy:
    """Return the remedy that removes heads, without action if it costs too much or saves too little.

    ``saves`` is the saved share of the parameters. ``costs`` is the relative increase of the loss, which
    ``price`` states as text.
    """
    words = f"choose heads again and remove them{price}"
    remedy = compress_remedy(["heads"], f"{tolerance:g}", words, "heads", saves)
    remedy = unless_too_little(remedy.model_copy(update={"costs": costs}), saves)
    reason = remedy.no_action
    if importance.is_chance:
        reason = "the model predicts hardly better than chance: no head matters"
    elif math.isnan(costs):
        reason = "no sequence was held out to price it"
    elif costs > tolerance:
        reason = f"the held-out cost of {costs:+.2%} exceeds the tolerance of {tolerance:.2%}"
    return remedy.model_copy(update={"no_action": reason})
