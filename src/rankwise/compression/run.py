"""Compress parts of a model, each to its own target, and measure the costs and the savings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import nn

from rankwise._internals.batches import batch_size, each_batch, to_device, without_logits
from rankwise._internals.forward import (
    Progress,
    check_in_memory,
    config_value,
    device_of,
    eval_mode,
    out_of_memory,
    preserve_random_state,
    run_model,
)
from rankwise._internals.statistics import mean
from rankwise._internals.threads import exclusive
from rankwise.auditing.error_hints import batch_errors
from rankwise.compression import DEFAULT_PARTS, PARTS
from rankwise.compression.evaluate import evaluate, snapshot
from rankwise.compression.records import Compression, LayerCost
from rankwise.compression.save import check_config, note_structure, pretrained_models, structure_of
from rankwise.compression.trials import Found, Job, NoLayersError, Solution, check_part, find_part, solve_part
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
from rankwise.tracing.model_checks import check_capturable

QUANTIZERS = ("torchao", "bitsandbytes", "optimum.quanto", "hqq", "gptqmodel", "awq", "torch.ao.nn.quantized")
"""Modules with classes of quantized layers and weights."""
Targets = dict[str, tuple[float | int | None, float | int | None]]
"""Share to keep and tolerance of each part; one of the two is None."""


@exclusive
def compress(
    model: nn.Module,
    batches: Iterable[Any],
    keep: float | int | Mapping[str, float | int] | None = None,
    tolerance: float | int | Mapping[str, float | int] | None = None,
    parts: str | Sequence[str] | None = None,
    *,
    remove: int | None = None,
    uniform: bool = False,
    calibrate: int = 0,
    held_out: Iterable[Any] | None = None,
    time: bool = False,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Compression:
    r"""Make parts of a trained model smaller in place, and measure the costs and the savings.

    Parts are done in this order; each starts from the model that the earlier parts left:

    - ``blocks`` removes whole blocks, one after another. The cost of each single block is measured, then the
      joint cost with the blocks removed so far. The configuration gets fewer layers, so that the class of
      the model loads the result without Rankwise.
    - ``heads`` removes attention heads with their weights. Query heads that share keys are removed together.
    - ``key-heads`` merges key heads, so that more query heads share each: keys and values are aligned first,
      and the output layers get the least squares of their old outputs. The class of the model loads the
      result without Rankwise.
    - ``width`` narrows queries and keys. Without rotary positions, r columns remain: logits Q Kᵀ become
      (Q A)(K B)ᵀ with A = S^½ V_r and B = S^−½ V_r, where V are the eigenvectors of S^½ P S^½, P = Σ qqᵀ and
      S = Σ kkᵀ. These factors have the least squared error of logits over all pairs of calibration tokens.
      With rotary positions, the channel pairs that cost least are removed. Heads share one budget of width.
    - ``kv`` computes a decoder's keys and values from a latent (one short vector per token and layer), which
      its cache stores instead. After ``width`` the latent replaces the narrow keys.

    Each part is tried on the model before the work begins. Layers for which the trial fails are skipped and
    reported.
    Cost of ``width``: two passes over `batches`, whose queries and keys stay in memory; a softmax per channel
    of a head of 16 sequences, or of all with a tolerance; with `calibrate`, three softmaxes per step.

    Args:
        model: any module; it is changed in place. Its class and attention code stay. ``blocks``,
            ``key-heads`` and uniform ``heads`` change its configuration.
        batches: calibration data; a few thousand tokens.
        keep: share to keep, 0 < keep < 1; 0.5 by default. A mapping names its parts, such as
            ``{"heads": 0.9, "kv": 0.5}``; a number applies to each part. The unit depends on the part:
            channels of queries and keys for ``width``, the number of blocks for ``blocks``, of heads for
            ``heads``, of key heads for ``key-heads``. For ``kv``, bytes of the cache of 4,096 tokens, or as
            many as the model reads, with windows as they are kept.
        tolerance: instead of `keep`, the largest cost on the calibration data, as a number or a mapping. The
            cost of ``width`` is attention KL in nats. The cost of ``kv`` is the KL of the outputs in nats,
            predicted to second order. The cost of ``blocks``, ``heads`` and ``key-heads`` is a share of the
            loss. The record has a note if the cost is above the tolerance.
        parts: names of the parts. Omit it if `keep` or `tolerance` is a mapping. By default, ``width`` and
            ``kv`` if the model allows them. ``heads`` is the default if the model allows neither.
        remove: number of blocks to remove, instead of a target of the part ``blocks``.
        uniform: if True, the part ``heads`` removes as many key heads from each layer, or as many query heads
            of each key head, so that a plain configuration describes the result.
        calibrate: steps of Adam per layer of ``width``.
        held_out: data on which the costs are measured; the calibration data by default. Batches may have
            several lengths: costs are measured for each, and the largest is the headline.
        time: if True, measure seconds per decoding step, or per pass, before and after.
        seed: random seed of calibration and of sampled labels.
        on_progress: function called with each step's text, and the finished share of these steps, or NaN.

    Raises:
        CompressionError: if a part is unknown or has two targets, a target is out of range, the model does
            not allow a part, memory runs out, or the model is already compressed or cannot be saved. The
            model is then unchanged.
        InputError: if there are no batches, or the model does not run on one of them.

    Source: the factors of ``width`` are KQ-SVD (arXiv 2512.05916) with one budget over heads.

    Examples:
        >>> import torch, rankwise as rw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)).eval()
        >>> batch = {"input_ids": torch.randint(0, 50, (4, 24))}
        >>> done = rw.compress(model, [batch], keep={"width": 0.75, "kv": 0.5})
        >>> done.parts, done.kept_cache.after / done.kept_cache.before <= 0.5
        (['width', 'kv'], True)
    """
    targets = part_targets(parts, keep, tolerance, remove)
    named = any((parts is not None, remove, isinstance(keep, Mapping), isinstance(tolerance, Mapping)))
    check_compressible(model)
    if uniform and not (named and "heads" in targets):
        expected, fix = "the part 'heads', which it is for", 'Name it: `parts="heads"`, or `--parts heads`.'
        got = ", ".join(targets) if named else "no parts"
        raise CompressionError("`uniform`", expected=expected, got=got, fix=fix)
    whole_number("`calibrate`", calibrate, 0, error=CompressionError)
    data = list(each_batch(batches))
    eval_data = list(each_batch(held_out, "held_out")) if held_out is not None else data
    step = "a batch"

    def report(what: str, done: float = math.nan) -> None:
        nonlocal step
        step = what
        if on_progress is not None:
            on_progress(what, done)

    solutions: dict[str, Solution] = {}
    modes = {name: module.training for name, module in model.named_modules()}
    # New linear layers draw random weights, which must not change the caller's random numbers.
    with eval_mode(model), preserve_random_state(model):
        try:
            report("the parts that the model allows")
            layers_of = find_parts(model, data[0], list(targets) if named else None)
            jobs = {
                name: Job(
                    model,
                    layers,
                    data,
                    eval_data,
                    *targets[name],
                    calibrate,
                    seed,
                    report,
                    remove,
                    uniform=uniform,
                )
                for name, layers in layers_of.items()
            }
            for name, job in jobs.items():
                check_part(name, job)
            lengths = read_lengths(model, data, "batches")
            tokens = sum(map(sum, lengths))
            lengths = lengths if eval_data is data else read_lengths(model, eval_data, "held_out")
            before = snapshot(model, eval_data)
            with ExitStack() as applied:
                for name, job in jobs.items():
                    if solutions:  # find the layers again, because earlier parts changed them
                        job.found, job.reused = find_part(name, model, data[0]), {}
                    solutions[name] = solve_part(name, job)
                    applied.enter_context(solutions[name].change)
                changes = [solution.change for solution in solutions.values()]
                longest = [max(each, default=0) for each in lengths]
                measured = evaluate(model, eval_data, longest, changes, before, time, report)
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
    measured_on = "the calibration data" if held_out is None else "held-out data"
    return _record(model, data, tokens, targets, solutions, measured, measured_on, seed)


def part_targets(
    parts: str | Sequence[str] | None,
    keep: float | int | Mapping[str, float | int] | None,
    tolerance: float | int | Mapping[str, float | int] | None,
    remove: int | None = None,
) -> Targets:
    """Return the share to keep (by default 0.5) or the tolerance of each named part, in the order of `PARTS`.

    Both are None for blocks if `remove` is their number. If no part is named, all parts get the same target.
    Raise `CompressionError` for an invalid target.
    """
    numbers = None if remove is None else {"blocks": whole_number("`remove`", remove, error=CompressionError)}
    targets = {"keep": keep, "tolerance": tolerance, "remove": numbers}
    if not any(target is not None for target in targets.values()):
        targets["keep"] = 0.5
    mappings = [target for target in targets.values() if isinstance(target, Mapping)]
    names: list[Any] = [*chain(*mappings)] if mappings else [*PARTS]
    if parts is not None:
        if isinstance(keep, Mapping) or isinstance(tolerance, Mapping):
            expected = "None, because the targets name their parts"
            raise CompressionError("`parts`", expected=expected, got=repr(parts), fix="Omit it.")
        listed = isinstance(parts, Sequence) and not isinstance(parts, str)
        names = [*(parts if listed else [parts]), *(numbers or ())]
    if not names:
        fix = f"Known: {', '.join(PARTS)}."
        raise CompressionError("`parts`", expected="at least one part", got="none", fix=fix)
    for name in names:
        one_of("`parts`", name, PARTS, error=CompressionError)
    pairs: Targets = {}
    for name in sorted(set(names), key=PARTS.index):
        pair = {kind: x.get(name) if isinstance(x, Mapping) else x for kind, x in targets.items()}
        given = [kind for kind, target in pair.items() if target is not None]
        if len(given) != 1:
            expected = "a share to keep or a tolerance, or a number of blocks to remove"
            fix, got = "Omit one of them." if given else "Omit the part.", " and ".join(given) or "none"
            raise CompressionError(f"part {name!r}", expected=expected, got=got, fix=fix)
        for kind, interval in (("keep", "(0, 1)"), ("tolerance", "(0, inf)")):
            if (number := pair[kind]) is not None:
                in_range(f"`{kind}`", number, interval, error=CompressionError)
        pairs[name] = pair["keep"], pair["tolerance"]
    return pairs


def check_compressible(model: nn.Module) -> None:
    """Raise if a model cannot be changed or saved, or is compressed already."""
    subject, fix = (
        f"model {type(model).__name__}",
        "Load it first: `AutoModelForCausalLM.from_pretrained(name)`.",
    )
    instance_of("`model`", model, nn.Module, "a torch.nn.Module", fix=fix)
    check_capturable(model)
    for name, module in model.named_modules():
        for kind in (type(module), *(type(weight.data) for weight in module.parameters(recurse=False))):
            if kind.__module__.startswith(QUANTIZERS):
                got = f"{name!r}, quantized ({kind.__module__}.{kind.__name__})"
                fix = "Compress the original model, then quantize the result."
                raise CompressionError(subject, expected="weights in floating point", got=got, fix=fix)
    if torch.is_inference_mode_enabled() or any(weight.is_inference() for weight in model.parameters()):
        got = "torch.inference_mode(), or weights made in it"
        fix = "Load the model and call this outside of it."
        raise CompressionError(subject, expected="a model with derivatives", got=got, fix=fix)
    check_in_memory(model, CompressionError)
    if structure_of(model).changes:
        expected, got = "a model that is not compressed yet", "a compressed model"
        fix = "Load the original and compress it once; name all parts together."
        raise CompressionError(subject, expected=expected, got=got, fix=fix)
    for inner in pretrained_models(model):
        check_config(inner)


def find_parts(model: nn.Module, batch: Any, names: Sequence[str] | None) -> dict[str, Found[Any]]:
    """Return the layers that each part can change. Raise `NoLayersError` for all parts that have no layers.

    If `names` is None, use each of `DEFAULT_PARTS` that works. If neither works, use ``heads``.
    """
    layers: dict[str, Found[Any]] = {}
    errors: dict[str, NoLayersError] = {}
    for name in DEFAULT_PARTS if names is None else names:
        try:
            layers[name] = find_part(name, model, batch)
        except NoLayersError as error:
            errors[name] = error
    if names is None:
        return layers or {"heads": find_part("heads", model, batch)}
    if errors:
        first, *others = errors.values()
        also = f"; none for {' and '.join([*errors][1:])} either" if others else ""
        work = f"Parts that work: {', '.join(layers)}." if layers else "No named part works."
        got, fix = f"{first.got}{also}", f"{first.fix} {work}".strip()
        raise NoLayersError(first.subject, expected=first.expected, got=got, fix=fix)
    return layers


def read_lengths(model: nn.Module, batches: list[Any], name: str) -> list[list[int]]:
    """Run the model on all batches, and return the numbers of real tokens that the first mixer reads.

    There is one number per sequence and a list per batch.
    """
    lengths = []
    for number, batch in enumerate(batches, start=1):
        sites: list[CapturedMixer] = []
        failures = batch_errors(model, batch, f"`{name}`, batch {number}")
        with failures, torch.no_grad(), capture(model, on_mixer=sites.append):
            run_model(model, without_logits(model, to_device(batch, device_of(model))))
        lengths.append(sites[0].valid_tokens.sum(1).tolist() if sites else [])
    return lengths


# --- record ----------------------------------------------------------------------------------------------


def _record(
    model: nn.Module,
    data: list[Any],
    tokens: int,
    targets: Targets,
    solutions: dict[str, Solution],
    measured: dict[str, Any],
    measured_on: str,
    seed: int,
) -> Compression:
    every = list(solutions.values())
    left: dict[str, list[int]] = {}
    for solution in every:  # later parts count the key heads that earlier parts left
        for site, kept in solution.key_heads.items():
            left[site] = [left[site][head] for head in kept] if site in left else kept
    heads = [head for solution in every for head in solution.heads]
    heads = [
        head.model_copy(update={"head": left[head.site][head.head]})
        if head.part == "width" and head.site in left
        else head
        for head in heads
    ]
    latents = [latent for solution in every for latent in solution.latents]
    merged = [merged for solution in every for merged in solution.merged]
    items: list[Any] = [*latents, *heads, *merged]
    numbers = {item.site: item.layer for item in items}
    kl = {site: cost for solution in every for site, cost in solution.kl.items()}
    layers = [
        LayerCost(site=site, layer=layer, attention_kl=kl.get(site, math.nan))
        for site, layer in numbers.items()
    ]
    notes = [note for solution in every for note in solution.notes]
    worst = max(measured["costs"], key=lambda cost: cost.cost)
    if abs(worst.loss_added) < 2 * worst.spread:
        notes.append(
            f"The loss added, {worst.loss_added:.2g}, is within twice its spread over {worst.windows} "
            f"windows, ± {worst.spread:.2g}: these data do not tell it from 0."
        )
    for name, solution in solutions.items():
        if not (solution.change.modules or solution.change.attributes):
            notes.append(f"{name}: nothing was removed. Lower `keep` or raise the tolerance.")
        tolerance = targets[name][1]
        if tolerance is None:
            continue
        spread = {"kv": worst.spread, "width": math.nan}.get(name, worst.relative_spread)
        if tolerance < spread:
            notes.append(
                f"{name}: the tolerance {tolerance:g} is below the spread of the cost, ± {spread:.2g}: "
                "hold out more data to test it."
            )
        cost, costs = solution.cost, dict[str, float]()
        if name == "width":
            costs["the calibration data"] = mean(head.kl_calibrated for head in solution.heads)
            cost = mean(solution.kl.values())
        elif name == "kv":
            costs["the calibration data"] = sum(latent.output_kl for latent in solution.latents)
            if len(solutions) == 1:  # then all of the measured cost is due to it
                cost = max(cost.output_kl for cost in measured["costs"])
        elif math.isnan(cost) and len(solutions) == 1:
            cost = worst.relative
        costs[measured_on] = max(costs.get(measured_on, 0.0), cost)  # NaN does not replace a number
        notes += [
            f"{name}: the cost on {data} is {cost:.3g}, above the tolerance {tolerance:g}."
            for data, cost in costs.items()
            if cost > tolerance
        ]
    record = Compression(
        model=config_value(model, "name_or_path") or type(model).__name__,
        parts=list(solutions),
        sequences=sum(batch_size(batch) for batch in data),
        tokens=tokens,
        measured_on=measured_on,
        heads=heads,
        layers=layers,
        latents=latents,
        blocks=[block for solution in every for block in solution.blocks],
        merged=merged,
        attention_kl=mean(layer.attention_kl for layer in layers),
        left_out={site: reason for solution in every for site, reason in solution.skipped.items()},
        notes=notes,
        about={"torch": torch.__version__, "threads": str(torch.get_num_threads()), "seed": str(seed)},
        **measured,
    )
    notes += [
        f"{row.bits}-bit keys and values cost less, {row.cost.cost:+.4f}, in {row.cache_bytes:,} bytes: "
        "quantize the cache of the original instead."
        for row in record.quantized
        if not row.refused and list(solutions) == ["kv"] and row.bits == 8  # caches lose more with fewer
        if row.cost.cost < worst.cost
        if row.cache_bytes <= record.kept_cache.after + record.kept_cache.kept_keys
    ]
    return record.model_copy(update={"notes": notes})
