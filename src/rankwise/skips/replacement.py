"""A mixer made for the place of an attention layer, from its projections where it has them."""

import inspect
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from rankwise.errors import InputError, did_you_mean
from rankwise.skips.attention_sites import SeenAttention
from rankwise.skips.replaced_attention import moved_like

Kind = Literal["tssa", "linear"]
KINDS: tuple[Kind, ...] = ("tssa", "linear")
OUTPUTS = ("o_proj", "out_proj")


class Replacement(BaseModel, extra="forbid"):
    """One layer whose attention was replaced."""

    layer: int
    name: str
    """The module that was replaced, such as ``model.layers.2.self_attn``."""
    kind: Kind
    heads: int
    head_dim: int
    causal: bool
    options: dict[str, Any] = {}
    """Of the mixer, as given."""
    copied: list[str] = []
    """Its projections that start from those of the attention layer."""


def plan(attention: nn.Module, seen: SeenAttention, kind: Kind, options: dict[str, Any]) -> Replacement:
    """Say what is to stand in the place of a layer.

    Args:
        attention: the layer.
        seen: what it took and gave.
        kind: of the mixer.
        options: of the mixer.
    """
    query = getattr(attention, "q_proj", None)
    wide = query.out_features if isinstance(query, nn.Linear) else seen.width
    return Replacement(
        layer=seen.layer, name=seen.name, kind=kind, heads=seen.heads, head_dim=wide // seen.heads,
        causal=seen.causal, options=options,
    )  # fmt: skip


def make_mixer(attention: nn.Module, note: Replacement, width: int) -> nn.Module:
    """Make the mixer, in the dtype and on the device of the layer; note which projections were copied.

    Args:
        attention: the layer.
        note: what the mixer is to be.
        width: of the tokens.

    Raises:
        InputError: for an option that the mixer does not take.
    """
    from rankwise.models.mixers import MIXERS

    known = list(inspect.signature(MIXERS[note.kind]).parameters)[1:]
    for option in note.options:
        if option not in known:
            raise InputError(
                f"`replace_attention` with kind={note.kind!r}",
                expected=f"options of {MIXERS[note.kind].__name__}",
                got=repr(option),
                fix=did_you_mean(option, known),
            )
    query = getattr(attention, "q_proj", None)
    bias = not isinstance(query, nn.Linear) or query.bias is not None
    given = {"head_dim": note.head_dim, "causal": note.causal, "bias": bias, **note.options}
    mixer = MIXERS[note.kind](width, note.heads, **given)
    note.copied = _copy(attention, mixer, note)
    return moved_like(mixer, attention).train(attention.training)


@torch.no_grad()
def _copy(attention: nn.Module, mixer: nn.Module, note: Replacement) -> list[str]:
    """Copy the projections that the layer has in the shapes of the mixer's."""
    if note.kind == "tssa":
        pairs = {"in_proj": "v_proj"}
    else:
        pairs = {name: name for name in ("q_proj", "k_proj", "v_proj")}
    output = next((name for name in OUTPUTS if hasattr(attention, name)), "")
    copied = []
    for own, theirs in {**pairs, "out_proj": output}.items():
        target, source = getattr(mixer, own), getattr(attention, theirs, None)
        if not isinstance(source, nn.Linear):
            continue
        output_sign = -1 if (note.kind, own) == ("tssa", "out_proj") else 1
        rows = slice(None) if own == "out_proj" else _rows(source, note)
        if source.weight[rows].shape == target.weight.shape:
            target.weight.copy_(output_sign * source.weight[rows])
            if target.bias is not None:  # TSSA's sign is on the weights alone: a bias is added last
                target.bias.zero_() if source.bias is None else target.bias.copy_(source.bias[rows])
            copied.append(own)
    return copied


def _rows(source: nn.Linear, note: Replacement) -> Tensor:
    """Rows of a projection by query head: those of grouped keys and values several times."""
    rows = torch.arange(source.out_features, device=source.weight.device)
    groups = source.out_features // note.head_dim
    if groups and source.out_features % note.head_dim == 0 and note.heads % groups == 0:
        rows = rows.view(groups, -1).repeat_interleave(note.heads // groups, 0).flatten()
    return rows
