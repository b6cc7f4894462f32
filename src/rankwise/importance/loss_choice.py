"""Choose the loss of a model from the model, its batches and its output."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import (
    LABELS,
    Batch,
    drop_unused_labels,
    label_position,
    real_tokens,
    token_ids,
)
from rankwise._internals.forward import config_value, eval_mode
from rankwise.errors import InputError
from rankwise.importance.losses import (
    IGNORE_INDEX,
    LOSS_HINT,
    DivergenceLoss,
    FunctionLoss,
    LabelLoss,
    Loss,
    LossBatch,
    StateLoss,
    first_floating,
    invalid_label,
    logits_of,
    loss_of,
    named_tensor,
)
from rankwise.importance.output_head import CHUNK, FirstPass, OutputHead, find_head, first_pass
from rankwise.importance.settings import FEW_TOKENS, MANY_CLASSES, ImportanceSettings, LossName

MASKED_SHARE = 0.15
"""Fraction of tokens that are masked, as in the training of masked language models."""

SAME_LOSS = 0.01
"""Largest relative difference, due to bfloat16, between two computations of the same loss."""
Given = Callable[[LossBatch], Tensor | None]

CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel", "LMHead", "DoubleHeadsModel")
NOT_ONE_CLASS = ("regression", "multi_label_classification")
"""Problem types of transformers in which logits do not choose one of several classes."""
MASKED_CLASSES = ("ForMaskedLM", "ForPreTraining")


def model_loss(
    model: nn.Module, batches: Sequence[Batch], settings: ImportanceSettings | None = None
) -> Loss:
    """Return the loss that fits a model, its batches and its output on the first batch.

    Cost: two forward passes of the first batch, or of its first sequence if the logits are large; more if
    several modules could be the output head.

    Args:
        model: any module.
        batches: batches as for `rankwise.audit`.
        settings: settings of importance: ``loss``, ``mask_token``, ``tokens`` and ``seed`` are read.

    Raises:
        InputError: if the named loss does not fit the model, or labels of a batch do not.

    Examples:
        >>> model = torch.nn.Linear(2, 3)
        >>> batch = torch.ones(4, 2), torch.tensor([0, 1, 2, -100])
        >>> loss = model_loss(model, [batch])
        >>> loss.name, loss(model, batch).requires_grad
        ('given labels', True)
    """
    with eval_mode(model), torch.no_grad():
        first = first_pass(model, batches[0])
        return choose_loss(model, batches, first, settings or ImportanceSettings())[0]


def choose_loss(
    model: nn.Module,
    batches: Sequence[Batch],
    first: FirstPass,
    settings: ImportanceSettings,
    *,
    sampled: bool = False,
) -> tuple[Loss, list[LossBatch]]:
    """Return the loss for a model and its first pass, and all batches prepared for it.

    If the logits have a token axis, the model runs once more, to see if its head alone returns them. If
    ``sampled``, the default of ``settings.tokens`` applies; otherwise None reads all tokens.
    Raise `InputError` if the loss does not fit the model, or labels of a batch do not.
    """
    inputs = [drop_unused_labels(model, batch)[0] for batch in batches]
    loss = _fitting_loss(model, LossBatch(first.inputs, first.original), first.output, settings)
    prepared = [loss.prepare(*both, number) for number, both in enumerate(zip(inputs, batches, strict=True))]
    loss.check(prepared, first.output)
    if isinstance(loss, LabelLoss):
        loss.chance = math.log(logits_of(first.output).shape[-1])
    if isinstance(loss, LabelLoss | DivergenceLoss):
        logits = logits_of(first.output)
        has_many = sampled and logits.shape[-1] > MANY_CLASSES
        loss.positions, loss.seed = settings.tokens or (FEW_TOKENS if has_many else None), settings.seed
        head = find_head(model, first, logits_of) if logits.dim() == 3 else None
        if isinstance(head, OutputHead):
            loss.head = head
        elif head is not None and logits.numel() > CHUNK:
            loss.note = "; ".join(filter(None, [loss.note, f"logits of all tokens at once, because {head}"]))
    elif settings.tokens is not None:
        raise InputError(
            "`tokens` of importance", expected="a loss of tokens or labels", got=f"the loss {loss.name!r}",
            fix="Leave it out: this loss reads the whole output.",
        )  # fmt: skip
    return loss, prepared


def _fitting_loss(model: nn.Module, batch: LossBatch, output: Any, settings: ImportanceSettings) -> Loss:
    """Return the loss that the settings name. For ``auto``, return the loss that fits the output.

    ``auto`` chooses the first loss that fits: next tokens of causal and encoder-decoder language models;
    labels of the batch; masked tokens of masked language models, if the mask token is known; the model's own
    loss; otherwise the change of the output (KL divergence of ``logits``, or relative squared change).
    """
    loss, mask_token = settings.loss, settings.mask_token
    if callable(loss):
        return FunctionLoss(loss, getattr(loss, "__name__", type(loss).__name__))
    returned = loss_of(output)
    # if the model returns no loss, its argument `y` may be an input, so labels are not read by position
    given = partial(_given, None if returned is None else label_position(model))
    makers: dict[str, Callable[[], Loss]] = {
        "causal": lambda: _next_tokens(batch, output, "input_ids", "causal", given),
        "encoder-decoder": lambda: _next_tokens(batch, output, "decoder_input_ids", "encoder-decoder", given),
        "masked": lambda: _masked(batch, mask_token, settings.seed, given),
        "labels": lambda: _labels(batch, output, given),
    }
    name, labels = loss, given(batch)
    if name == "auto":
        name = _fitting(model, batch, output, mask_token, labels)
    may_shift = name in ("causal", "labels") and loss != "labels"
    if returned is not None and may_shift and _is_classes(labels, output):
        nearest, apart = _nearest(returned, name, batch, output, makers)
        unlike = apart > SAME_LOSS * returned.abs().mean() and named_tensor(output, "logits") is None
        name = "own" if unlike and loss == "auto" else nearest
    if name in makers:
        return makers[name]()
    if name == "own":
        return FunctionLoss(lambda output, batch: loss_of(output), "the model's own, one number a batch")
    logits = named_tensor(output, "logits")
    classes = logits is not None and _may_be_classes(model, logits)
    compared = DivergenceLoss() if classes else StateLoss(output)
    if labels is not None and settings.loss == "auto":
        compared.note = _unused(labels, "they are not one class per position of the output")
    return compared


def _nearest(
    returned: Tensor, name: LossName, batch: LossBatch, output: Any, makers: Mapping[str, Callable[[], Loss]]
) -> tuple[LossName, float]:
    """Return the name of the loss that is nearest to the model's own loss, and the difference of the two.

    The choice is between labels that the model shifts by one token, as causal models of transformers do, and
    labels that the user has shifted.
    """
    errors: dict[LossName, float] = {}
    other: LossName = "labels" if name == "causal" else "causal"
    for kind in (name, other):
        if kind == "labels" or logits_of(output).dim() == 3:
            losses = makers[kind]().read(output, batch)
            errors[kind] = abs(float(losses.total.sum() / losses.count.sum()) - float(returned.mean()))
    nearest = min(errors, key=errors.__getitem__)
    return nearest, errors[nearest]


def _fitting(
    model: nn.Module, batch: LossBatch, output: Any, mask_token: int | None, labels: Tensor | None
) -> LossName:
    returned, ids = loss_of(output), token_ids(batch.batch)
    decodes, generates = config_value(model, "is_encoder_decoder"), continues_texts(model)
    logits = named_tensor(output, "logits")
    if logits is None and (generates or labels is not None):  # `output` is a tuple or has other names
        if returned is output:
            return "own"
        logits = first_floating(output)
    if logits is None:
        return "output" if named_tensor(output, "loss") is None else "own"
    if decodes and generates and logits.dim() == 3:
        return "encoder-decoder"
    if generates and logits.dim() == 3 and ids is not None and logits.shape[1] == ids.shape[1]:
        return "causal"
    if labels is not None:
        if returned is None:
            return "labels" if _of_places(labels, output) else "output"
        return "labels" if _is_classes(labels, output) else "own"
    if _has_class(model, MASKED_CLASSES) and mask_token is not None and logits.dim() == 3:
        return "masked"
    return "output" if named_tensor(output, "loss") is None else "own"


def continues_texts(model: nn.Module) -> bool:
    """Return True if the class of a model says that the model predicts the next token of a text."""
    can_generate = getattr(model, "can_generate", None)
    generates = _has_class(model, CAUSAL_CLASSES) or (callable(can_generate) and bool(can_generate()))
    return generates and not _has_class(model, MASKED_CLASSES)


def _has_class(model: nn.Module, endings: tuple[str, ...]) -> bool:
    """Return True if the name of a model's class, or of one of its base classes, has one of the endings."""
    return any(kind.__name__.endswith(endings) for kind in type(model).__mro__)


def _given(position: int | None, batch: LossBatch) -> Tensor | None:
    """Return the labels in a batch. Return None if there are none.

    In a dict, labels are found by name. In a tuple, labels are y of (x, y), or the item at ``position``.
    """
    given, labels = batch.original, None
    if isinstance(given, Mapping):
        labels = next((given[name] for name in LABELS if name in given), None)
    elif isinstance(given, tuple | list):
        place = 1 if len(given) == 2 and len(batch.batch) == 1 else position
        labels = given[place] if place is not None and place < len(given) else None
    return labels if isinstance(labels, Tensor) else None


def _may_be_classes(model: nn.Module, logits: Tensor) -> bool:
    """Return True if a softmax of logits (B, C) or (B, T, C) may be over classes.

    One logit is a score, and logits as many as the pixels of a patch are pixels. Neither are classes, nor are
    the logits of models for regression or several labels.
    """
    patch, channels = config_value(model, "patch_size"), config_value(model, "num_channels", default=3)
    sides = [side for side in (patch if isinstance(patch, list | tuple) else [patch] * 2) if side]
    size = math.prod(sides) * channels * config_value(model, "tubelet_size", default=1)
    pixels = {size} if sides else set()
    kind = config_value(model, "problem_type")
    return logits.dim() in (2, 3) and logits.shape[-1] not in {0, 1, *pixels} and kind not in NOT_ONE_CLASS


def _of_places(labels: Tensor, output: Any) -> bool:
    """Return True if each position of the logits has an integer label, and at least two classes exist."""
    shape = logits_of(output).shape  # 4 axes: multiple choice, whose labels only the model's own loss reads
    fits = labels.shape == shape[:-1] and len(shape) < 4
    return fits and not labels.is_floating_point() and shape[-1] > 1


def _is_classes(labels: Tensor | None, output: Any) -> bool:
    """Return True if each position of the logits has a class, or `IGNORE_INDEX`, as its label."""
    if labels is None or not _of_places(labels, output):
        return False
    return not invalid_label(labels, logits_of(output).shape[-1])


def _next_tokens(batch: LossBatch, output: Any, name: str, kind: str, given_of: Given) -> Loss:
    """Return the loss that predicts each token from the tokens before it, without padding."""
    if token_ids(batch.batch, name) is None and given_of(batch) is None:
        raise InputError(
            f"loss {kind!r}", expected=f"token ids in the batch, or `{name}` or `labels` of a dict",
            got="none", fix=LOSS_HINT,
        )  # fmt: skip
    if logits_of(output).dim() != 3:
        raise InputError(
            f"loss {kind!r}", expected="logits (B, T, V)", got=f"{tuple(logits_of(output).shape)}",
            fix=LOSS_HINT,
        )  # fmt: skip

    note, given, ids = "", given_of(batch), token_ids(batch.batch, name)
    of_each_token = ids if ids is not None else given
    assert of_each_token is not None
    if logits_of(output).shape[1] != of_each_token.shape[1]:  # prompt tuning puts vectors before the tokens
        raise InputError(
            f"loss {kind!r}", expected=f"logits of the {of_each_token.shape[1]} tokens in the batch",
            got=f"logits of {logits_of(output).shape[1]} positions", fix=LOSS_HINT,
        )  # fmt: skip
    if ids is not None and given is not None and given.shape[1:] != ids.shape[1:]:
        note, given_of = _unused(given, "they are not one per token"), lambda batch: None

    def labels(batch: LossBatch) -> Tensor:
        given, ids = given_of(batch), token_ids(batch.batch, name)
        if given is not None:  # encoder-decoder models shift their inputs, not the labels
            return given if name == "decoder_input_ids" else given[:, 1:]
        assert ids is not None
        real = real_tokens(batch.batch, ids.shape, name == "decoder_input_ids").to(ids.device)
        return ids[:, 1:].masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORE_INDEX)

    return LabelLoss(f"next tokens, {kind}", "nats per token", labels, given=given_of, note=note)


def _unused(labels: Tensor, why: str) -> str:
    return f"labels {tuple(labels.shape)} of batch 1 do not count: {why}"


def _masked(batch: LossBatch, mask_token: int | None, seed: int, given: Given) -> Loss:
    """Return the loss on masked tokens: as labeled in the batch, or else on tokens masked at random."""
    if given(batch) is not None:
        return LabelLoss("masked tokens, as labelled", "nats per token", given, given=given)
    if mask_token is None or not isinstance(batch.batch, Mapping) or token_ids(batch.batch) is None:
        raise InputError(
            "loss 'masked'", expected="`labels` in the batch, or the id of the mask token", got="neither",
            fix="Pass importance=ImportanceSettings(mask_token=tokenizer.mask_token_id), batches as dicts.",
        )  # fmt: skip

    def mask(inputs: Any, original: Any, number: int) -> LossBatch:
        ids = inputs["input_ids"]
        real = real_tokens(inputs, ids.shape).to(ids.device)
        # The first and the last real token are not masked, because they may be [CLS] and [SEP].
        inner = real & (real.cumsum(1) > 1) & (real.flip(1).cumsum(1).flip(1) > 1)
        generator = torch.Generator().manual_seed(seed + number)
        drawn = torch.rand(ids.shape, generator=generator, dtype=torch.float32).to(ids.device)
        chosen = inner & (drawn < MASKED_SHARE)
        masked = {**inputs, "input_ids": ids.masked_fill(chosen, mask_token)}
        return LossBatch(masked, original, number, target=ids.masked_fill(~chosen, IGNORE_INDEX))

    name = f"masked tokens, {MASKED_SHARE:.0%} of them, seed {seed}"
    return LabelLoss(name, "nats per token", lambda batch: batch.target, mask)


def _labels(batch: LossBatch, output: Any, given: Given) -> Loss:
    labels, logits = given(batch), logits_of(output)
    if labels is None or labels.shape != logits.shape[:-1]:
        raise InputError(
            "loss 'labels'", expected=f"`labels` {tuple(logits.shape[:-1])} below {logits.shape[-1]}",
            got="none" if labels is None else f"{tuple(labels.shape)} {labels.dtype}",
            fix=f"Pass batches as dicts with `labels`. {LOSS_HINT}",
        )  # fmt: skip
    return LabelLoss("given labels", "nats per label", given, given=given)
