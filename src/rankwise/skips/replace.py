"""Softmax attention of chosen layers replaced by a mixer of linear time, and undone."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from rankwise._internals.forward import Batch
from rankwise.errors import ReplacementError, did_you_mean
from rankwise.skips.attention_sites import SeenAttention, see_attention
from rankwise.skips.replaced_attention import ReplacedAttention, moved_like
from rankwise.skips.replacement import KINDS, Kind, Replacement, make_mixer, plan


def replace_attention(
    model: nn.Module,
    layers: int | str | Iterable[int | str],
    kind: Kind = "tssa",
    example: Batch | None = None,
    **options: Any,
) -> list[Replacement]:
    r"""Replace the softmax attention of some layers by TSSA or linear attention, in place.

    Formula: of `rankwise.models.mixers.TokenStatisticsAttention` or `LinearAttention`, causal where the
    attention layer is. Where it has projections q_proj, k_proj, v_proj and o_proj, linear attention starts
    from all four and TSSA from v_proj and −o_proj, as its output is −Π w/(1 + m); others are drawn anew.
    Rotated positions are not carried over. The model is worse until the mixers have learnt the outputs of the
    layers they stand for: `experiments/replacement.py` does that.
    Cost: a forward pass on the example. Afterwards O(T D) a layer in place of O(T²), and in a cache a state
    that does not grow.
    Source: the partial swap is ours; copied projections are those of J. Kasai et al., "Finetuning Pretrained
    Transformers into RNNs", EMNLP 2021.

    Args:
        model: a model whose attention layers have an argument ``hidden_states``, as those of transformers do.
        layers: their numbers, or the names of their modules; a single one needs no list.
        kind: tssa or linear.
        example: a batch to run on, as `audit` takes them; made by us for models of transformers.
        options: of the mixer, such as ``half_life=…`` or ``feature_dim=…``.

    Returns:
        What was replaced, by layer.

    Raises:
        ReplacementError: if there is no such layer, it was replaced before, or it is of another form; then
            nothing has changed.
        InputError: for an option that the mixer does not take.

    Examples:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> replace_attention(model, [1], "linear")[0].name
        'model.layers.1.self_attn'
        >>> restore_attention(model)
        ['model.layers.1.self_attn']
    """
    if kind not in KINDS:
        raise ReplacementError(
            "`kind`", expected="tssa or linear", got=repr(kind), fix=did_you_mean(str(kind), KINDS)
        )
    chosen = [layers] if isinstance(layers, int | str) else layers
    seen = see_attention(model, example)
    names = {_chosen(model, layer, seen) for layer in chosen}
    made = []
    for one in sorted((seen[name] for name in names), key=lambda one: (one.layer, one.name)):
        attention = _checked(model, one)
        note = plan(attention, one, kind, options)
        mixer = make_mixer(attention, note, one.width)
        made.append(ReplacedAttention(attention, mixer, note, one.results))
    for module in made:
        put(model, module.note.name, module)
    return [module.note for module in made]


def restore_attention(model: nn.Module) -> list[str]:
    """Put the attention layers back that `replace_attention` took out, with the weights they had.

    They go to the device and dtype that the model has now.

    Args:
        model: the model.

    Returns:
        Their names; none where nothing was replaced.
    """
    replaced = replaced_layers(model)
    for name, module in replaced.items():
        attention = moved_like(module.attention, module)
        attention.train(module.training)
        put(model, name, attention)
    return list(replaced)


def replacements_of(model: nn.Module) -> list[Replacement]:
    """What of a model's attention was replaced.

    Args:
        model: the model.
    """
    return [module.note for module in replaced_layers(model).values()]


def _chosen(model: nn.Module, layer: int | str, seen: Mapping[str, SeenAttention]) -> str:
    names = [name for name, one in seen.items() if layer in (name, one.layer)]
    if len(names) == 1:
        return names[0]
    there = [f"{one.layer} ({name})" for name, one in seen.items()]
    before = [one for one in replacements_of(model) if layer in (one.name, one.layer)]
    raise ReplacementError(
        f"layer {layer!r} of {type(model).__name__}",
        expected="the number or name of one layer with softmax self-attention",
        got="one that was replaced before" if before else f"{len(names)} such layers",
        fix="Undo it with `restore_attention(model)`."
        if before
        else f"There are: {', '.join(there) or 'none'}.",
    )


def _checked(model: nn.Module, seen: SeenAttention) -> nn.Module:
    if seen.problem:
        raise ReplacementError(
            f"attention {seen.name!r} of {type(model).__name__}",
            expected="a layer with `hidden_states` (B, T, D) in and the same shape out",
            got=seen.problem,
            fix="Replace other layers.",
        )
    return model.get_submodule(seen.name)


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module into another one's place.

    Args:
        model: the model.
        name: of the place.
        module: what goes there.
    """
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def replaced_layers(model: nn.Module) -> dict[str, ReplacedAttention]:
    """The modules that stand for attention layers, by name.

    Args:
        model: the model.
    """
    return {name: part for name, part in model.named_modules() if isinstance(part, ReplacedAttention)}
