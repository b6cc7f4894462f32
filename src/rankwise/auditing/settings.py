"""Settings of an audit (function, command or monitor), which are checked before a model runs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn

from rankwise._internals.forward import Progress
from rankwise._internals.statistics import DELTA, check_delta
from rankwise.auditing.initialization import AtInitSettings
from rankwise.auditing.provenance import check_provenance
from rankwise.errors import InputError, instance_of, one_of, whole_number
from rankwise.importance.settings import ImportanceOption, ImportanceSettings, importance_settings
from rankwise.tracing import OperatorFunction

RankMethod = Literal["auto", "exact", "estimate"]
"""Method of computing ranks; "auto" is exact for matrices of at most `EXACT_BYTES` in float64."""
MapOption = str | Iterable[tuple[int, int]]
"""Heads whose attention maps are kept: "flagged", "all", "3:7,5:0" (layer:head), or pairs (layer, head)."""
AtInitOption = bool | int | Callable[[int], nn.Module] | AtInitSettings


@dataclass(frozen=True)
class ChosenHeads:
    """Heads whose attention maps are kept: pairs (layer, head), or all heads if ``heads`` is empty.

    If ``flagged``, only heads with a finding keep their maps.
    """

    heads: frozenset[tuple[int, int]] = frozenset()
    flagged: bool = False

    def includes(self, layer: int, head: int) -> bool:
        """Return True if the map of this head must be recorded.

        If ``flagged``, all maps are recorded, because findings are known only at the end of the audit.
        """
        return not self.heads or (layer, head) in self.heads


@dataclass(frozen=True)
class AuditSettings:
    """Validated settings of an audit."""

    delta: float = DELTA
    tokenizer: Callable[..., Any] | None = None
    rank_method: RankMethod = "auto"
    sites: Mapping[str, OperatorFunction] | None = None
    blocks: str | None = None
    maps: ChosenHeads | None = None
    importance: ImportanceSettings | None = None
    at_init: AtInitSettings | None = None
    keep_moments: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)
    on_progress: Progress | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta)
        one_of("`rank_method`", self.rank_method, get_args(RankMethod))
        sites, tokenizer = self.sites, self.tokenizer
        named = isinstance(sites, Mapping) and all(isinstance(name, str) for name in sites)
        if sites is not None and not (named and all(map(callable, sites.values()))):
            expected, fix = "a dict from names of modules to functions", "`sites={'layers.0.mixer': f}`."
            raise InputError("`sites`", expected=expected, got=repr(sites), fix=fix)
        names = "names of the residual blocks as a string"
        instance_of("`blocks`", self.blocks, (str, type(None)), names, fix="For example `blocks='layers.*'`.")
        check_callable("on_progress", self.on_progress)
        instance_of("`keep_moments`", self.keep_moments, bool, "True or False", fix="Try True.")
        if not (tokenizer is None or callable(tokenizer) or hasattr(tokenizer, "decode")):
            fix = "Pass what `AutoTokenizer.from_pretrained` returns, or leave it out: ids are shown."
            got = type(tokenizer).__name__
            raise InputError("`tokenizer`", expected="a tokenizer", got=got, fix=fix)
        check_provenance(self.provenance)

    @classmethod
    def of(
        cls,
        *,
        attention_maps: MapOption | None = None,
        importance: ImportanceOption = False,
        loss: bool = False,
        at_init: AtInitOption = False,
        provenance: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> "AuditSettings":
        """Return the settings from options of `rankwise.audit`; raise `InputError` if an option is wrong."""
        if instance_of("`loss`", loss, bool, "True or False", fix="Try `loss=True`.") and importance is False:
            importance = ImportanceSettings(estimates=False)
        return cls(
            maps=chosen_heads(attention_maps),
            importance=importance_settings(importance, fields.get("tokenizer")),
            at_init=at_init_settings(at_init),
            provenance=dict(provenance or {}),
            **fields,
        )


def check_callable(name: str, value: Any) -> None:
    """Raise `InputError` if an optional argument is neither None nor callable."""
    if value is not None and not callable(value):
        fix = "Pass a function, or leave it out."
        raise InputError(f"`{name}`", expected="a function", got=repr(value), fix=fix)


def chosen_heads(option: Any) -> ChosenHeads | None:
    """Return the heads whose attention maps are kept. Return None if ``option`` is None.

    Raise `InputError` if ``option`` is malformed.
    """
    if option is None:
        return None
    given = option
    if isinstance(option, str):
        word = option.strip().lower()
        if word in ("flagged", "all"):
            return ChosenHeads(flagged=word == "flagged")
        given = [pair.split(":") for pair in word.split(",")]
    try:
        pairs = [(int(layer), int(head)) for layer, head in given]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        expected = '"flagged", "all", or heads by layer and number, such as "3:7,5:0"'
        fix = 'Counted from 0: `attention_maps="3:7"` keeps head 7 of layer 3.'
        raise InputError("`attention_maps`", expected=expected, got=repr(option), fix=fix)
    return ChosenHeads(frozenset(pairs))


def at_init_settings(option: Any) -> AtInitSettings | None:
    """Return the settings of audits at initialization. Return None if ``option`` is False.

    Raise `InputError` if the option is wrong.
    """
    if isinstance(option, bool):
        return AtInitSettings() if option else None
    if isinstance(option, int):
        option = AtInitSettings(option)
    elif callable(option) and not isinstance(option, nn.Module):
        option = AtInitSettings(build=option)
    expected = "True, a number of seeds, a function of a seed that builds the model, or `AtInitSettings`"
    fix = "`at_init=3` also audits the model at three initializations."
    settings = instance_of("`at_init`", option, AtInitSettings, expected, fix=fix)
    whole_number("seeds of `at_init`", settings.seeds, fix=fix)
    return settings
