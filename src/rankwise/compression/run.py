"""Compress parts of a model, each to its own target, and measure the costs and the savings."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rankwise._internals.forward import (
    batch_errors,
    batch_size,
    config_value,
    device_of,
    each_batch,
    eval_mode,
    out_of_memory,
    preserve_random_state,
    run_model,
    to_device,
)
from rankwise._internals.statistics import mean
from rankwise.auditing.error_hints import fix_hint
from rankwise.compression import NARROWS, PARTS
from rankwise.compression.evaluate import Snapshot, evaluate, snapshot
from rankwise.compression.layers import NoLayersError
from rankwise.compression.part import Job, Solution, solve_part
from rankwise.compression.record import Compression, LayerPrice
from rankwise.compression.save import check_saveable, note_structure, pretrained_models, structure_of
from rankwise.errors import (
    CompressionError,
    RankwiseError,
    first_line,
    in_range,
    instance_of,
    one_of,
    whole_number,
)
from rankwise.tracing import CapturedMixer, capture

Targets = dict[str, tuple[float | int | None, float | int | None]]
"""Share to keep and tolerance of each part; one of the two is None."""
SLOWER = 1.03
"""Ratio of latency after/before above which a model is reported as slower, if 9 of 10 rounds agree."""


def compress(
    model: nn.Module,
    batches: Iterable[Any],
    keep: float | int | Mapping[str, float | int] | None = None,
    tolerance: float | int | Mapping[str, float | int] | None = None,
    parts: str | Sequence[str] | None = None,
    *,
    calibrate: int = 0,
    held_out: Iterable[Any] | None = None,
    time: bool = False,
    seed: int = 0,
    on_step: Callable[[str], None] | None = None,
) -> Compression:
    r"""Make parts of a trained model smaller in place, and measure the costs and the savings.

    Parts are done in this order; each starts from the model that the earlier parts left:

    - ``heads`` removes attention heads with their weights. Query heads that share keys are removed together.
    - ``qk`` narrows queries and keys to r columns: logits Q Kᵀ become (Q A)(K B)ᵀ with A = S^½ V_r and
      B = S^−½ V_r, where V are the eigenvectors of S^½ P S^½, P = Σ qqᵀ and S = Σ kkᵀ. These factors have the
      least squared error of logits over all pairs of calibration tokens. Heads share one budget of width.
    - ``rotary`` narrows queries and keys with rotary positions: it removes the channel pairs that cost least.
      Next to ``qk``, each narrows the layers that it fits, and one of them may fit none.
    - ``kv`` computes a decoder's keys and values from a latent (one short vector per token and layer), which
      its cache stores in their place. After ``qk`` or ``rotary`` the latent replaces the narrow keys.

    Each part is tried on the model first; layers on which it does not work are skipped and reported.
    Cost: two passes over `batches`, whose queries and keys stay in memory; 32 softmaxes per head of
    16 sequences; with `calibrate`, three softmaxes per step.

    Args:
        model: any module; it is changed in place. Its class, attention code and configuration stay.
        batches: calibration data; a few thousand tokens.
        keep: share to keep, 0 < keep < 1; 0.5 by default. A mapping names its parts, such as
            ``{"heads": 0.9, "kv": 0.5}``; a number applies to each of `parts`. The unit depends on the part:
            the width for ``qk`` and ``rotary``, bytes of the cache for ``kv``, the number of heads for
            ``heads``.
        tolerance: instead of `keep`, the largest cost on the calibration data, as a number or a mapping:
            for ``qk`` and ``rotary``, attention KL in nats (of attention rows before from after); for ``kv``,
            KL of the outputs in nats, predicted to second order; for ``heads``, a share of the loss. The
            record has a note if the cost is above the tolerance.
        parts: names of the parts, ``qk`` by default; None if `keep` or `tolerance` is a mapping.
        calibrate: steps of Adam per layer of ``qk`` and ``rotary``; Ctrl-C keeps the finished layers.
        held_out: data on which the costs are measured; the calibration data by default.
        time: if True, measure latency before and after.
        on_step: called with a description of each step.

    Raises:
        CompressionError: if a part is unknown or has two targets, a target is out of range, a part cannot be
            done, memory runs out, or the model is already compressed or cannot be saved. The model is then
            unchanged.
        InputError: if there are no batches, or the model does not run on one of them.

    Warns:
        UserWarning: if `time` is True and the model became slower.

    Source: ``qk`` is KQ-SVD (arXiv 2512.05916) with one budget over heads.

    Examples:
        >>> import torch, rankwise as rw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)).eval()
        >>> batch = {"input_ids": torch.randint(0, 50, (4, 24))}
        >>> done = rw.compress(model, [batch], keep={"qk": 0.75, "kv": 0.5})
        >>> done.parts, done.mean_width, done.cache_bytes_after / done.cache_bytes_before <= 0.5
        (['qk', 'kv'], 12.0, True)
    """
    targets = part_targets(parts, keep, tolerance)
    fix = "Load it first: `AutoModelForCausalLM.from_pretrained(name)`."
    instance_of("`model`", model, nn.Module, "a torch.nn.Module", fix=fix)
    whole_number("`calibrate`", calibrate, 0, error=CompressionError)
    if structure_of(model).changes:
        raise CompressionError(
            f"model {type(model).__name__}",
            expected="a model that is not compressed yet",
            got="a compressed model",
            fix="Load the original and compress it once; name all parts together.",
        )
    check_saveable(model)
    data = list(each_batch(batches))
    eval_data = list(each_batch(held_out, "held_out")) if held_out is not None else data
    step = "a batch"

    def report(what: str) -> None:
        nonlocal step
        step = what
        if on_step is not None:
            on_step(what)

    solutions: dict[str, Solution] = {}
    modes = {name: module.training for name, module in model.named_modules()}
    # New linear layers draw weights.
    with eval_mode(model), preserve_random_state(model), _named_outputs(model):
        try:
            tokens = _count_tokens(model, data, "batches")
            if eval_data is not data:
                _count_tokens(model, eval_data, "held_out")
            before = snapshot(model, eval_data, "before")
            with ExitStack() as applied:
                for name, (own_keep, own_tolerance) in targets.items():
                    job = Job(model, data, eval_data, own_keep, own_tolerance, calibrate, seed, report)
                    try:
                        solutions[name] = solve_part(name, job)
                    except NoLayersError:
                        if (name, True) not in (("qk", "rotary" in targets), ("rotary", "qk" in solutions)):
                            raise
                        continue
                    applied.enter_context(solutions[name].change)
                changes = [solution.change for solution in solutions.values()]
                after = evaluate(model, eval_data, changes, before, time, report)
                applied.pop_all()
        except Exception as error:
            full = out_of_memory(error)
            if isinstance(error, RankwiseError) and not full:
                raise
            fewer = "Pass fewer or shorter sequences, or smaller batches; the model is unchanged."
            raise CompressionError(
                f"model {type(model).__name__}",
                expected=f"memory for {step}" if full else f"code that works for {step}",
                got=first_line(error) if full else f"{type(error).__name__}: {first_line(error)}",
                fix=fewer if full else "The model is unchanged.",
            ) from error
    for solution in solutions.values():
        for name, module in solution.change.modules.items():
            module.train(modes[name if name in modes else name.rpartition(".")[0]])
    for inner in pretrained_models(model):
        note_structure(inner)
    record = _record(model, data, tokens, targets, solutions, before, after, held_out is not None, seed)
    others = [name for name in solutions if calibrate and name not in NARROWS]
    plain = [f"{name}: steps of calibration are for qk and rotary alone." for name in others]
    slower = [x for x in record.latency if x.ratio > SLOWER and x.low > 1]
    each = ", ".join(f"{x.phase} at {x.tokens} tokens {x.ratio:.2f} times the time" for x in slower)
    slow = [f"The model became slower on this machine: {each}. To go back, load the original."] * bool(slower)
    for note in slow:
        warnings.warn(note, UserWarning, stacklevel=2)
    unused = [f"{name}: no layer has such queries and keys." for name in targets if name not in solutions]
    return record.model_copy(update={"notes": [*record.notes, *plain, *unused, *slow]})


def part_targets(
    parts: str | Sequence[str] | None,
    keep: float | int | Mapping[str, float | int] | None,
    tolerance: float | int | Mapping[str, float | int] | None,
) -> Targets:
    """Return the share to keep or the tolerance of each part, in the order of `PARTS`; by default 0.5."""
    keep = 0.5 if keep is None and tolerance is None else keep
    given: list[tuple[str, Any]] = [("keep", keep), ("tolerance", tolerance)]
    mappings = [value for _, value in given if isinstance(value, Mapping)]
    for name, value in given:
        if mappings and not isinstance(value, Mapping | None):
            raise CompressionError(
                f"`{name}`", expected="a mapping of parts, like the other target", got=repr(value),
                fix='Name the parts: `{"heads": 0.9, "kv": 0.5}`.',
            )  # fmt: skip
    if mappings and parts is not None:
        raise CompressionError(
            "`parts`", expected="None, because the targets name their parts", got=repr(parts), fix="Omit it."
        )
    if mappings:
        names = [part for mapping in mappings for part in mapping]
    elif isinstance(parts, Sequence) and not isinstance(parts, str):
        names = list(parts)
    else:
        names = ["qk" if parts is None else parts]
    if not names:
        raise CompressionError(
            "`parts`", expected="at least one part", got="none", fix=f"Known: {', '.join(PARTS)}."
        )
    for part in names:
        one_of("`parts`", part, PARTS, error=CompressionError)
        if names.count(part) > 1 and not mappings:
            raise CompressionError(
                "`parts`", expected="each part once", got=f"{part!r} twice", fix="Name each part once."
            )
    targets: Targets = {}
    for part in (part for part in PARTS if part in names):
        own = {name: value.get(part) if isinstance(value, Mapping) else value for name, value in given}
        count = sum(value is not None for value in own.values())
        if count != 1:
            raise CompressionError(
                f"part {part!r}", expected="a share to keep or a tolerance",
                got="both" if count else "None", fix="Omit one of them." if count else "Omit the part.",
            )  # fmt: skip
        for name, interval in (("keep", "(0, 1)"), ("tolerance", "(0, inf)")):
            if (number := own[name]) is not None:
                in_range(f"`{name}`", number, interval, error=CompressionError)
        targets[part] = own["keep"], own["tolerance"]
    return targets


@contextmanager
def _named_outputs(model: nn.Module) -> Iterator[None]:
    """Context manager in which models of transformers return outputs with names."""
    tuples: list[Any] = [one.config for one in model.modules() if config_value(one, "return_dict") is False]
    try:
        for config in tuples:
            config.return_dict = True
        yield
    finally:
        for config in tuples:
            config.return_dict = False


def _count_tokens(model: nn.Module, batches: list[Any], name: str) -> int:
    """Run the model on all batches; return the number of real tokens that its first mixer reads."""
    total = 0
    for number, batch in enumerate(batches, start=1):
        sites: list[CapturedMixer] = []
        failures = batch_errors(model, batch, fix_hint, f"`{name}`, batch {number}")
        with failures, torch.no_grad(), capture(model, on_mixer=sites.append):
            run_model(model, to_device(batch, device_of(model)))
        total += int(sites[0].valid_tokens.sum()) if sites else 0
    return total


# --- record ----------------------------------------------------------------------------------------------


def _record(
    model: nn.Module, data: list[Any], tokens: int, targets: Targets, solutions: dict[str, Solution],
    before: Snapshot, after: Snapshot, held_out: bool, seed: int,
) -> Compression:  # fmt: skip
    every = list(solutions.values())
    left = every[0].key_heads  # `heads` comes first
    heads = [head for solution in every for head in solution.heads]
    heads = [
        head.model_copy(update={"head": left[head.site][head.head]})
        if head.part in NARROWS and head.site in left
        else head
        for head in heads
    ]
    latents = [latent for solution in every for latent in solution.latents]
    places = before.places | {head.site: (head.stack, head.layer) for head in heads}
    places |= {x.site: (places.get(x.site, ("", 0))[0], x.layer) for x in latents}
    kl = {latent.site: math.nan for latent in latents}
    for solution in every:  # a removed head has no attention to compare
        kl |= {site: own for site, own in solution.kl.items() if site not in kl or not math.isnan(own)}
    layers = [
        LayerPrice(
            site=site,
            layer=places[site][1],
            kl=own,
            output_error=after.state_error(before, (places[site][0], places[site][1] + 1)),
        )
        for site, own in kl.items()
    ]
    narrowed = {head.site for head in heads if head.part in NARROWS}
    notes = [note for solution in every for note in solution.notes]
    figures = "held-out data" if held_out else "the calibration data"
    for name, solution in solutions.items():
        cost = solution.cost
        if len(solutions) == 1 and name != "heads":  # then the measured costs are those of the part
            cost = after.fields["output_kl"] if name == "kv" else mean(kl.values())
        notes += _part_notes(name, targets[name][1], solution, figures, cost)
    notes += after.notes
    return Compression(
        model=config_value(model, "name_or_path") or type(model).__name__,
        parts=list(solutions),
        complete=all(solution.complete for solution in every),
        sequences=sum(batch_size(batch) for batch in data),
        tokens=tokens,
        figures=figures,
        heads=heads,
        layers=layers,
        curves=[curve for solution in every for curve in solution.curves],
        latents=latents,
        kl=mean(layer.kl for layer in layers),
        left_out={
            site: reason
            for part, solution in solutions.items()
            for site, reason in solution.skipped.items()
            if part not in NARROWS or site not in narrowed
        },
        notes=notes,
        about={"torch": torch.__version__, "threads": str(torch.get_num_threads()), "seed": str(seed)},
        **after.fields,
    )


def _part_notes(
    part: str, tolerance: float | int | None, solution: Solution, figures: str, measured: float
) -> list[str]:
    """Return notes if a part removed nothing, or costs more than its tolerance on some data."""
    heads, latents = solution.heads, solution.latents
    removed = [*(x.width < x.before for x in heads), *(x.rank < x.full for x in latents)]
    notes = [] if any(removed) else [f"{part}: nothing was removed. {solution.advice}"]
    attention = mean(head.kl_calibrated for head in heads) if part != "heads" else 0.0
    costs = {"the calibration data": max(attention, sum(latent.nats for latent in latents))}
    costs[figures] = max(costs.get(figures, 0.0), measured)  # NaN is not above a number
    return notes + [
        f"{part}: the cost on {data} is {cost:.3g}, above the tolerance {tolerance:g}."
        for data, cost in costs.items()
        if tolerance is not None and cost > tolerance
    ]
