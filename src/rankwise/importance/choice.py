"""Which loss fits a model and its batches."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankwise._internals.forward import LABELS
from rankwise.errors import InputError, did_you_mean
from rankwise.importance.losses import (
    LEFT_OUT,
    Case,
    DivergenceLoss,
    FunctionLoss,
    LabelLoss,
    Loss,
    LossFunction,
    StateLoss,
    strange,
)
from rankwise.importance.outputs import ANOTHER, first_floating, logits_of, real_tokens, token_ids

LossName = Literal["auto", "causal", "masked", "encoder-decoder", "labels", "own", "output"]
LOSSES: tuple[LossName, ...] = ("auto", "causal", "masked", "encoder-decoder", "labels", "own", "output")
MASKED_SHARE = 0.15
"""Of the tokens, as masked language models are trained."""

CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel", "LMHead", "DoubleHeadsModel")
MASKED_CLASSES = ("ForMaskedLM", "ForPreTraining")


def choose_loss(
    model: nn.Module,
    case: Case,
    output: Any,
    wanted: LossName | LossFunction = "auto",
    *,
    mask_token: int | None = None,
    seed: int = 0,
) -> Loss:
    """The loss by its name, or the loss that fits.

    ``auto``: labels of the batch, where it has some; next tokens of causal and encoder-decoder language
    models; masked tokens of masked ones, where the mask token is known; else how far the output moves, as a
    divergence where it is called ``logits``, else as a squared change.

    Args:
        model: the model.
        case: its first batch.
        output: what it gave for that batch.
        wanted: a name out of `LOSSES`, or a function of (output, batch).
        mask_token: id of the mask token, for masked language models.
        seed: of the tokens that are masked.

    Raises:
        InputError: if there is no such loss, or it does not fit.
    """
    if callable(wanted):
        return FunctionLoss(wanted, getattr(wanted, "__name__", type(wanted).__name__))
    name = _fitting(model, case, output, mask_token) if wanted == "auto" else check_loss(wanted)
    makers: dict[str, Callable[[], Loss]] = {
        "causal": lambda: _next_tokens(case, output, "input_ids", "causal"),
        "encoder-decoder": lambda: _next_tokens(case, output, "decoder_input_ids", "encoder-decoder"),
        "masked": lambda: _masked(case, mask_token, seed),
        "labels": lambda: _labels(case, output),
        "own": lambda: _own(output),
        "output": lambda: _moved(output),
    }
    return makers[name]()


def check_loss(name: str) -> LossName:
    """Refuse a name that no loss has.

    Args:
        name: out of `LOSSES`.

    Raises:
        InputError: naming the nearest.
    """
    for known in LOSSES:
        if name == known:
            return known
    raise InputError(
        "loss", expected=f"one of {', '.join(LOSSES)}, or a function of (output, batch)", got=repr(name),
        fix=did_you_mean(str(name), LOSSES),
    )  # fmt: skip


def _fitting(model: nn.Module, case: Case, output: Any, mask_token: int | None) -> str:
    names = [kind.__name__ for kind in type(model).__mro__]
    logits, labels, ids = _named(output, "logits"), _given(case), token_ids(case.batch)
    if logits is None:
        return "labels" if labels is not None and _of_places(labels, output) else "output"
    decodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    generates = any(name.endswith(CAUSAL_CLASSES) for name in names) or _can_generate(model)
    if decodes and generates and logits.dim() == 3:
        return "encoder-decoder"
    masked = any(name.endswith(MASKED_CLASSES) for name in names)
    if generates and not masked and logits.dim() == 3 and ids is not None and logits.shape[1] == ids.shape[1]:
        return "causal"
    if isinstance(labels, Tensor):
        if _named(output, "loss") is None:
            return "labels" if _of_places(labels, output) else "output"
        return "labels" if _of_places(labels, output) and not strange(labels, logits.shape[-1]) else "own"
    return "masked" if masked and mask_token is not None and logits.dim() == 3 else "output"


def _can_generate(model: nn.Module) -> bool:
    ask = getattr(model, "can_generate", None)
    return bool(ask()) if callable(ask) else False


def _named(output: Any, name: str) -> Tensor | None:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def _given(case: Case) -> Tensor | None:
    """Labels that came with a batch: by their name, or the second of two items, (x, y)."""
    given, labels = case.given, None
    if isinstance(given, Mapping):
        labels = next((given[name] for name in LABELS if name in given), None)
    elif isinstance(given, tuple | list) and len(given) == 2 and len(case.batch) == 1:
        labels = given[1]
    return labels if isinstance(labels, Tensor) else None


def _of_places(labels: Tensor, output: Any) -> bool:
    """Whether labels are whole numbers, one for each place of the logits of two classes or more."""
    logits = logits_of(output)
    whole = not labels.is_floating_point() and labels.shape == logits.shape[:-1]
    return whole and logits.shape[-1] > 1


def _next_tokens(case: Case, output: Any, name: str, kind: str) -> Loss:
    """Each token from those before it; the first is given, and padding is neither read from nor predicted."""
    if token_ids(case.batch, name) is None and _given(case) is None:
        raise InputError(
            f"loss {kind!r}", expected=f"token ids in the batch, or `{name}` or `labels` of a dict",
            got="none",
            fix=ANOTHER,
        )  # fmt: skip
    if logits_of(output).dim() != 3:
        raise InputError(
            f"loss {kind!r}", expected="logits (B, T, V)", got=f"{tuple(logits_of(output).shape)}",
            fix=ANOTHER,
        )  # fmt: skip

    def labels(case: Case) -> Tensor:
        given, ids = _given(case), token_ids(case.batch, name)
        if ids is not None and given is not None and given.shape[1:] != ids.shape[1:]:
            given = None  # labels of the sequences, not of their tokens
        if given is not None and name == "decoder_input_ids":
            return given  # the model shifts its inputs, not its labels
        if given is not None:
            return given[:, 1:]
        assert ids is not None
        real = real_tokens(case.batch, ids.shape, name == "decoder_input_ids").to(ids.device)
        return ids[:, 1:].masked_fill(~(real[:, 1:] & real[:, :-1]), LEFT_OUT)

    return LabelLoss(f"next tokens, {kind}", "nats per token", labels, given=_given)


def _masked(case: Case, mask_token: int | None, seed: int) -> Loss:
    """Masked tokens: labels where the batch has them, else a share of the tokens by a fixed seed."""
    if _given(case) is not None:
        name = "masked tokens, as labelled"
        return LabelLoss(name, "nats per token", lambda case: _whole(_given(case)), given=_given)
    if mask_token is None or not isinstance(case.batch, Mapping) or token_ids(case.batch) is None:
        raise InputError(
            "loss 'masked'", expected="`labels` in the batch, or the id of the mask token", got="neither",
            fix="Pass importance=ImportanceSettings(mask_token=tokenizer.mask_token_id), batches as dicts.",
        )  # fmt: skip

    def hidden(batch: Any, given: Any, number: int) -> Case:
        ids = batch["input_ids"]
        real = real_tokens(batch, ids.shape).to(ids.device)
        inner = real & (real.cumsum(1) > 1) & (real.flip(1).cumsum(1).flip(1) > 1)  # no [CLS], no [SEP]
        drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed + number)).to(ids.device)
        chosen = inner & (drawn < MASKED_SHARE)
        masked = {**batch, "input_ids": ids.masked_fill(chosen, mask_token)}
        return Case(masked, given, number, target=ids.masked_fill(~chosen, LEFT_OUT))

    name = f"masked tokens, {MASKED_SHARE:.0%} of them, seed {seed}"
    return LabelLoss(name, "nats per token", lambda case: _whole(case.target), hidden)


def _whole(labels: Tensor | None) -> Tensor:
    assert labels is not None
    return labels


def _labels(case: Case, output: Any) -> Loss:
    labels, logits = _given(case), logits_of(output)
    if labels is None or labels.shape != logits.shape[:-1]:
        raise InputError(
            "loss 'labels'", expected=f"`labels` {tuple(logits.shape[:-1])} below {logits.shape[-1]}",
            got="none" if labels is None else f"{tuple(labels.shape)} {labels.dtype}",
            fix=f"Pass batches as dicts with `labels`. {ANOTHER}",
        )  # fmt: skip
    return LabelLoss("given labels", "nats per label", lambda case: _whole(_given(case)), given=_given)


def _own(output: Any) -> Loss:
    if _named(output, "loss") is None:
        raise InputError(
            "loss 'own'", expected="a model that gives its `loss`", got="none",
            fix=f"Put `labels` into the batches. {ANOTHER}",
        )  # fmt: skip
    return FunctionLoss(lambda output, batch: output.loss, "the model's own, one number a batch")


def _moved(output: Any) -> Loss:
    logits = _named(output, "logits")
    if logits is not None and logits.dim() in (2, 3):
        return DivergenceLoss()
    first_floating(output)  # or says that there is nothing to compare
    return StateLoss()
