"""Add λ-skips to a model in place (x + f(x) becomes λ·x + f(x)), return their parameters, and remove them."""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rankwise._internals.batches import Batch, check_batch
from rankwise._internals.forward import check_in_memory, config_value, device_of
from rankwise._internals.threads import exclusive
from rankwise._internals.torch_private import COMPILED_PREFIX, is_compiled, is_program, remove_forward_hooks
from rankwise.errors import SkipError, did_you_mean, in_range, instance_of, one_of, strip_control
from rankwise.skips.hook_places import (
    NOTES,
    SkipPlace,
    blocks_without,
    check_module,
    find_places,
    skip_places,
)
from rankwise.skips.hooks import (
    AddResidual,
    HoldResidual,
    Scope,
    SkipHook,
    ThreadSlot,
)
from rankwise.skips.lambda_skip import own_skips
from rankwise.skips.observe import without_skips
from rankwise.skips.verify import verify
from rankwise.tracing.model_checks import is_distributed, split_modules

Per = Literal["layer", "channel"]
TOKENS, DECODER_TOKENS = 8, 6
"""Numbers of tokens for encoder and decoder in an example. Unequal numbers distinguish their states."""
WRAPPERS = frozenset({
    "AveragedModel", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule",
})  # fmt: skip
"""Names of wrapper classes, which do not synchronize parameters that are added after wrapping."""


class Skips(Mapping[str, nn.Parameter]):
    """Mapping from a site (the name of a mixer with λ) to its λ: ``skips["h.0.attn"]`` is a parameter.

    `places` maps the same names to the places where λ is applied. `notes` are limits that users must know.
    """

    def __init__(self, model: nn.Module, places: Iterable[SkipPlace], notes: Iterable[str] = ()) -> None:
        self._model = model
        self.places = {place.name: place for place in places}
        self.notes = tuple(notes)

    def __getitem__(self, site: str) -> nn.Parameter:
        place = self.places[site]
        return self._model.get_submodule(place.module).get_parameter(place.parameter)

    def parameters(self) -> list[nn.Parameter]:
        """Return all λ. A parameter that several sites share is listed once."""
        return list(dict.fromkeys(self.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        shown = [
            f"{strip_control(site)}: {value.item():g}" if value.numel() == 1
            else f"{strip_control(site)}: {value.numel()} channels, mean {value.mean():g}"
            for site, value in self.items()
        ]  # fmt: skip
        return f"Skips({{{', '.join(shown)}}})"


@exclusive
def add_lambda_skip(
    model: nn.Module,
    init: int | float = 1.0,
    learnable: bool = True,
    per: Per = "layer",
    sites: str | Iterable[str] | None = None,
    example: Batch | None = None,
    exist_ok: bool = False,
) -> Skips:
    """Change the skip connection around every mixer of a model in place: x + f(x) becomes λ·x + f(x).

    The model runs once on an example. A sum x + f(x) is a residual connection around a mixer if derivatives
    show that f moves information between tokens. λ is a parameter (``lambda_skip``) of an existing module, so
    that optimizers, ``state_dict`` and ``.to()`` include it; no class changes. With λ = 1, outputs are
    bit-identical. A second call adds λ at further ``sites`` and does not change λ at other sites. The changed
    model is then compared to scaled sums on the example. All λ of the model are returned.

    Cost: five forward passes on the example, and derivatives of its sums; afterwards one multiply-add of the
    token states per site.
    Source: "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", Eq. 3.

    Args:
        model: any module; PyTorch's fused encoder layers leave their fast path.
        init: initial λ; the paper starts a learned λ from −1. 0 removes the skip connections, with a warning.
        learnable: True if λ receives gradients.
        per: "layer" for one λ per site, "channel" for one λ per channel of each site.
        sites: names of sites, or of modules around them, with wildcards: ``"h.1*"``; all residual mixers by
            default.
        example: batch to run, as in `audit`; created automatically for models of transformers.
        exist_ok: True to accept that all chosen sites have a λ already.

    Raises:
        SkipError: if the model has no residual mixer, all chosen sites have λ-skips already, a name matches
            no site, λ is not finite, or the changed model does not compute λ·x + f(x).

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> skips = rw.add_lambda_skip(layer, init=2.0, example=torch.randn(1, 5, 8))
        >>> skips
        Skips({dropout1: 2})
        >>> rw.remove_lambda_skip(layer)
        >>> rw.skips.skips_of(layer)
        Skips({})
    """
    check_traceable(model)
    if example is not None:
        check_batch(example, "`example`")
    check_lambda("`init`", init)
    one_of("`per`", per, ("layer", "channel"), error=SkipError)
    one_of("`learnable`", learnable, (True, False), error=SkipError)
    present = skips_of(model)
    _check_present(model, present, per)
    example = example_for(model) if example is None else example
    with without_skips(model):
        places, missed = find_places(model, example)
    _check_places(model, places, missed, present)
    chosen = present.keys() | {place.name for place in match_places(places, sites)}
    new = [place for place in places if place.name in chosen - present.keys()]
    if not new and not exist_ok:
        expected = "a model without λ-skips" + ("" if sites is None else " at these sites")
        fix = "Change the λ it has (`rw.skips.skips_of(model)`), or call `rw.remove_lambda_skip(model)`."
        raise SkipError(
            f"model {type(model).__name__}", expected=expected, got=f"one with {len(present)}", fix=fix
        )
    handles: list[RemovableHandle] = []
    try:
        for place in new:
            handles += install(model, place, learnable=learnable, per=per)
        verify(model, example, [place for place in places if place.name in chosen], places)
    except BaseException:
        for handle in handles:
            handle.remove()
        for place in new:
            _forget(model.get_submodule(place.module), place)
        raise
    all_places = skip_places(model)
    skips = Skips(model, all_places, [*_notes_of_missed(model, places, missed), *_notes(all_places)])
    with torch.no_grad():
        for place in new:
            skips[place.name].fill_(init)
    return skips


def _check_present(model: nn.Module, present: Skips, per: Per) -> None:
    """Raise `SkipError` if `per` differs from the kind of the λ-skips that the model has."""
    if present and (per == "channel") != any(value.numel() > 1 for value in present.values()):
        expected = "the kind of λ that the model has at other sites"
        fix = "Use the other `per`, or call `rw.remove_lambda_skip(model)` first."
        raise SkipError(f"`per={per!r}`", expected=expected, got="the other kind", fix=fix)


def _check_places(
    model: nn.Module, places: Sequence[SkipPlace], missed: Sequence[str], present: Skips
) -> None:
    """Raise `SkipError` if the example has no place for λ, or lacks the place of a present λ-skip."""
    if not places:
        out = f"{len(missed)} out of reach of all modules, in {', '.join(missed[:3])}"
        got = out if missed else "none: no sum x + f(x) in which f mixes tokens"
        fix = (
            "A block must compute x + f(x) on states (B, T, D) or (T, D), with derivatives (no reentrant "
            "checkpoint) and f in a module, and the example have two tokens or more."
        )
        if built_in := own_skips(model):
            fix = f"The model has its own λ in {min(built_in)}: set `skip_init` in its configuration."
        expected = "residual connections around mixers"
        raise SkipError(f"model {type(model).__name__}", expected=expected, got=got, fix=fix)
    if lost := present.keys() - {place.name for place in places}:
        expected, got = "a batch on which every λ-skip runs", f"one on which {min(lost)!r} does not"
        fix = "Pass a batch of the kind the λ-skips were added with."
        raise SkipError("`example`", expected=expected, got=got, fix=fix)


@exclusive
def remove_lambda_skip(model: nn.Module) -> None:
    """Remove all λ-skips (example: `add_lambda_skip`). Raise `SkipError` if there are none."""
    check_skips(model)
    for module in model.modules():
        remove_forward_hooks(module, lambda hook: isinstance(hook, SkipHook))
        for place in list(vars(module).get(NOTES, ())):
            _forget(module, place)


def skips_of(model: nn.Module) -> Skips:
    """Return the λ-skips of a model, or no λ-skips if it has none (example: `add_lambda_skip`)."""
    places = skip_places(model)
    return Skips(model, places, _notes(places))


def check_skips(model: nn.Module) -> None:
    """Raise `SkipError` if a model has no λ-skips."""
    if not skip_places(model):
        subject, fix = f"model {type(model).__name__}", "Put them in with `rw.add_lambda_skip(model)`."
        raise SkipError(subject, expected="a model with λ-skips", got="one without", fix=fix)


def check_finite(subject: str, value: Tensor, fix: str, where: str = "") -> None:
    """Raise `SkipError` if a tensor has NaN or infinity."""
    if not bool(value.isfinite().all()):
        raise SkipError(subject, expected="finite numbers", got=f"NaN or infinity{where}", fix=fix)


def check_values(lambdas: Mapping[str, Tensor], when: str, fix: str) -> None:
    """Raise `SkipError` if λ of a site has NaN or infinity."""
    for name, value in lambdas.items():
        check_finite(f"λ of {name!r}{when}", value.detach(), fix)


def install(model: nn.Module, place: SkipPlace, learnable: bool, per: Per) -> list[RemovableHandle]:
    """Register the parameter λ = 1 and the hooks that apply λ at one place. Return the hooks' handles."""
    module, parameter = model.get_submodule(place.module), place.parameter
    devices = (tensor.device for tensor in (*module.parameters(), *model.parameters()))
    dtype = torch.promote_types(place.dtype, torch.float32)
    width = place.width if per == "channel" else 1
    scale = torch.ones(width, dtype=dtype, device=next(devices, torch.device("cpu")))
    module.register_parameter(parameter, nn.Parameter(scale, requires_grad=learnable))
    vars(module).setdefault(NOTES, []).append(place)
    held, around, source = ThreadSlot(), model.get_submodule(place.scope), model.get_submodule(place.source)
    return [
        around.register_forward_pre_hook(Scope(held)),  # runs first, to open the slot for x
        source.register_forward_pre_hook(HoldResidual(place.argument, held), with_kwargs=True),
        module.register_forward_hook(AddResidual(parameter, place.key, held), with_kwargs=True),
        around.register_forward_hook(Scope(held), always_call=True),
    ]


def _forget(module: nn.Module, place: SkipPlace) -> None:
    """Delete the parameter λ and its note from a module, if it has them."""
    if place in (notes := vars(module).get(NOTES, [])):
        delattr(module, place.parameter)
        notes.remove(place)
        if not notes:
            delattr(module, NOTES)


def match_places(places: list[SkipPlace], sites: str | Iterable[str] | None) -> list[SkipPlace]:
    """Return the places whose site, or a module around the site, matches a wildcard in ``sites``.

    Return all places if ``sites`` is None. Raise `SkipError` if a wildcard matches no place.
    """
    if sites is None:
        return places
    chosen: set[str] = set()
    given: Any = sites if isinstance(sites, Iterable) and not isinstance(sites, str) else [sites]
    for pattern in list(given) or [""]:
        instance_of("`sites`", pattern, str, "names of modules", fix="Omit it for all.", error=SkipError)
        depth = pattern.count(".") + 1
        # names are cut to the depth of the pattern: "h.1" then matches "h.1.attn"
        names = {place.name: ".".join(place.name.split(".")[:depth]) for place in places}
        matching = [site for site, name in names.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise SkipError(
                f"site {pattern!r}", expected="the name of a residual mixer, or of a module around one",
                got="none of that name", fix=did_you_mean(pattern, set(names.values())),
            )  # fmt: skip
        chosen.update(matching)
    return [place for place in places if place.name in chosen]


def check_lambda(subject: str, value: int | float) -> None:
    """Raise `SkipError` if λ is not a finite number in float32. Warn if λ is 0."""
    in_range(subject, value, "[-3.4e38, 3.4e38]", fix="1.0 changes nothing.", error=SkipError)
    if torch.tensor(float(value), dtype=torch.float32) == 0:
        effect = "tokens may become similar within a few layers, and no bound holds"
        warnings.warn(f"λ = 0 removes the skip connections: {effect}", UserWarning, stacklevel=3)


def _notes_of_missed(model: nn.Module, places: Iterable[SkipPlace], missed: list[str]) -> list[str]:
    """Return notes on residual connections and blocks that have no λ."""
    with_lambda = [name for place in places for name in (place.module, place.block)]
    without = blocks_without(model, [*with_lambda, *missed])
    notes = [
        f"no λ at the residual connection in {name}: no module gets x or returns f(x)" for name in missed
    ]
    if without:
        listed = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if without[3:] else "")
        notes.append(f"no λ in {listed}: no sum x + f(x) ran in it in which f mixes tokens")
    return notes


def _notes(places: Iterable[SkipPlace]) -> list[str]:
    dropping = [place.name for place in places if place.drops]
    limit = f"it is a function, not a module, and cannot be stepped over ({len(dropping)} sites)"
    return [f"in training, the dropout after {name} also acts on (λ − 1)·x: {limit}" for name in dropping[:1]]


def check_traceable(model: Any) -> None:
    """Raise if hooks cannot change a model: if it is compiled, wrapped, split, or in inference mode."""
    check_module(model)
    wrappers = WRAPPERS & {base.__name__ for module in model.modules() for base in type(module).__mro__}
    placed = [name for name, parameter in model.named_parameters() if is_distributed(parameter)]
    if is_program(model) or any(map(is_compiled, model.modules())) or wrappers:
        expected = "a module that is not compiled or wrapped yet"
        got = f"one wrapped by {min(wrappers)}" if wrappers else "one that is compiled or scripted"
        inner = [name for name, _ in model.named_children() if name in ("module", COMPILED_PREFIX[:-1])]
        which = f"inside, `model.{inner[0]}`," if inner else "itself"
        fix = f"Use the model {which} first, then compile or wrap it."
    elif placed or split_modules(model):
        expected = "a model whose weights are plain tensors, whole in this process"
        got = f"{len(placed)} DTensor weights, such as {placed[0]!r}" if placed else "layers split by a plan"
        fix = "Add or certify the skips on the model before it is parallelised, or load it without a plan."
    elif torch.is_inference_mode_enabled() or any(weight.is_inference() for weight in model.parameters()):
        expected = "a model outside of torch.inference_mode(), where derivatives can be taken"
        got = "inference mode, or parameters made in it"
        fix = "Build the model and call this outside of it; torch.no_grad() is allowed."
    else:
        check_in_memory(model, SkipError)
        return
    raise SkipError(f"model {type(model).__name__}", expected=expected, got=got, fix=fix)


def example_for(model: Any) -> Batch:
    """Return token ids or a noise image for a model of transformers. Raise `SkipError` for other models."""
    config: Any = getattr(model, "config", None)
    reads, device = getattr(model, "main_input_name", None), device_of(model)
    if config is None or reads not in ("input_ids", "pixel_values"):
        subject, got = f"model {type(model).__name__}", f"none, and its input is {reads or 'unknown'}"
        fix = "Pass a small batch (dict, tuple or tensor): `rw.add_lambda_skip(model, example=batch)`."
        raise SkipError(subject, expected="an example of its input", got=got, fix=fix)
    if reads == "pixel_values":
        config = config_value(config, "vision_config", default=config)
        size = config_value(config, "image_size", default=224)
        sides = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        shape = (1, config_value(config, "num_channels", default=3), *sides)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        return {"pixel_values": noise.to(device, model.dtype)}
    text = getattr(config, "get_text_config", lambda: config)()
    most = min(config_value(text, "vocab_size") or 64, 64)
    special = {config_value(text, f"{name}_token_id") for name in ("pad", "bos", "eos", "mask", "image")}
    words = [token for token in range(most) if token not in special] or [0]
    ids = torch.tensor([[words[(3 * i + 1) % len(words)] for i in range(TOKENS)]], device=device)
    example = {"input_ids": ids}
    if config_value(config, "is_encoder_decoder"):
        example["decoder_input_ids"] = ids[:, :DECODER_TOKENS]
    if "attention_mask" in inspect.signature(model.forward).parameters:
        example["attention_mask"] = torch.ones_like(ids)
    return example
