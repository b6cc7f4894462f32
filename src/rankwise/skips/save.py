"""Save the λ-skips of a model into a folder, and load them: λ in safetensors, a description in JSON."""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from rankwise._internals.batches import Batch
from rankwise._internals.files import write_file
from rankwise._internals.torch_private import original_name
from rankwise.errors import SkipError, first_line, instance_of
from rankwise.skips.add import Skips, add_lambda_skip, check_skips, check_values, remove_lambda_skip, skips_of
from rankwise.skips.hook_places import PARAMETER, skip_places
from rankwise.tracing.model_checks import is_distributed

NUMBERS, FACTS = "skips.safetensors", "skips.json"
LOWER = "Train them again with a lower learning rate."
OWN_MODEL = "Load them into the model they were saved from, or one of its configuration."


class SkipFacts(BaseModel, extra="forbid"):
    """Description of the model to which saved λ-skips belong."""

    format: Literal[4] = 4
    sites: list[str]
    parameters: str
    """Digest of the names and shapes of all parameters except λ."""
    frozen: list[str] = []
    """Sites whose λ receives no gradients."""
    made: dict[str, Any] = {}
    """Notes on how λ was found. `rankwise skip` replaces a folder only if the notes name the same model."""


def save_skips(model: nn.Module, folder: str | Path, made: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """Write λ-skips into a folder, as ``skips.safetensors`` and ``skips.json``. Return the paths of both.

    If FSDP2 shards the model, call this in every process, because λ is gathered from all of them.

    Args:
        model: model with λ-skips, or a wrapper of it such as DDP; the files are for the model itself.
        folder: folder to write; it is created if it is missing.
        made: notes on how λ was found.

    Raises:
        SkipError: if the model has no λ-skips, or a λ is not finite, or modules were replaced or renamed.
        InputError: if the folder cannot be written.

    Examples:
        >>> import tempfile, torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> x = torch.randn(1, 5, 8)
        >>> _ = rw.add_lambda_skip(layer, init=2.0, example=x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = rw.skips.save_skips(layer, folder)
        ...     rw.remove_lambda_skip(layer)
        ...     rw.skips.load_skips(layer, folder, example=x)
        Skips({dropout1: 2})
    """
    folder = Path(instance_of("`folder`", folder, (str, Path), "a path", fix="Name a folder."))
    check_skips(model)
    model = _unwrapped(model)
    skips = skips_of(model)
    # maps each name in the file to the name in the model
    sites = dict(zip(_names(model), skips, strict=True))
    numbers: dict[str, Tensor] = {}
    for name, site in sites.items():
        scale: Any = skips[site].detach()
        whole = scale.full_tensor() if is_distributed(scale) else scale  # FSDP2 splits λ over processes
        numbers[name] = whole.cpu().clone().contiguous()
    check_values(numbers, f" in {type(model).__name__}", LOWER)
    facts = SkipFacts(
        sites=list(sites), parameters=_digest(model), made=made or {},
        frozen=[name for name, site in sites.items() if not skips[site].requires_grad],
    )  # fmt: skip
    described = write_file(folder / FACTS, facts.model_dump_json(indent=1), "skips")
    return write_file(folder / NUMBERS, lambda path: path.write_bytes(save(numbers)), "skips"), described


def load_skips(
    model: nn.Module, folder: str | Path, example: Batch | None = None, missing_ok: bool = False
) -> Skips:
    """Add saved λ-skips to a model with the same parameters, and return the λ-skips (example: `save_skips`).

    Args:
        folder: folder that `save_skips` wrote.
        example: batch to run, as in `add_lambda_skip`.
        missing_ok: True to return no λ-skips if the folder has none, or is a name on the Hub.

    Raises:
        SkipError: if the files are missing or broken, or belong to another model.
    """
    folder = Path(instance_of("`folder`", folder, (str, Path), "a path", fix="Name a folder."))
    if missing_ok and not any((folder / name).is_file() for name in (FACTS, NUMBERS)):
        return Skips(model, [])
    if skips := skips_of(model):
        got, fix = f"one with {len(skips)}", "Call `rw.remove_lambda_skip(model)` first."
        raise SkipError(f"model {type(model).__name__}", expected="a model without λ-skips", got=got, fix=fix)
    path = folder / FACTS
    try:
        facts = SkipFacts.model_validate_json(path.read_bytes())
        path = folder / NUMBERS
        numbers = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:  # pydantic raises a ValueError
        missing = isinstance(error, FileNotFoundError)
        got = "no such file" if missing else f"{type(error).__name__}: {first_line(error)}"
        fix = (
            "Check the folder." if missing else "Save the skips again: `rw.skips.save_skips(model, folder)`."
        )
        expected = "a file that `save_skips` wrote"
        raise SkipError(f"skips {path}", expected=expected, got=got, fix=fix) from error
    if unequal := set(facts.sites) ^ set(numbers):
        expected, got = f"{FACTS} and {NUMBERS} that name the same sites", f"a difference in {min(unequal)!r}"
        fix = "Copy both files from the same save."
        raise SkipError(f"skips in {folder}", expected=expected, got=got, fix=fix)
    if facts.parameters != _digest(model):
        inner = [name for name, module in model.named_modules() if _digest(module) == facts.parameters]
        fix = f"Pass the model inside, `model.{inner[0]}`, before it is wrapped." if inner else OWN_MODEL
        raise _another(model, folder, "λ of one whose parameters have other names or shapes", fix)
    per: Any = "channel" if any(value.numel() > 1 for value in numbers.values()) else "layer"
    skips = add_lambda_skip(model, per=per, sites=facts.sites, example=example)
    try:
        if set(skips) != set(facts.sites) or any(skips[name].shape != numbers[name].shape for name in skips):
            raise _another(model, folder, "sites of other names or widths")
        with torch.no_grad():
            for name, parameter in skips.items():
                parameter.copy_(numbers[name])
                parameter.requires_grad_(name not in facts.frozen)
        check_values(skips, f" in {folder}", LOWER)  # a float64 value may be infinite in the dtype of λ
    except BaseException:
        remove_lambda_skip(model)
        raise
    return skips


def saved_notes(folder: Path) -> dict[str, Any]:
    """Return the notes on how the λ in a folder was found. Return {} without readable λ-skips."""
    with suppress(OSError, ValueError):
        return SkipFacts.model_validate_json((folder / FACTS).read_text("utf-8")).made
    return {}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that the λ-skips were added to, which may be inside wrappers.

    Raise `SkipError` if names of modules changed or if the model has an adapter.
    """
    changed = any(hasattr(module, "base_layer") for module in model.modules())
    sites = [place.name for place in skip_places(model)]
    roots = [] if changed else [root for root in model.modules() if _names(root) == sites]
    if roots:
        return roots[-1]  # the innermost: wrappers do not change `_names`
    raise SkipError(
        f"model {type(model).__name__}", expected="the model that λ was added to, or a wrapper",
        got="one with an adapter" if changed else "a part, several, or other names of modules",
        fix="Save it before it is wrapped, or merge adapters (`model.merge_and_unload()`).",
    )  # fmt: skip


def _names(model: nn.Module) -> list[str]:
    """Return the names of the sites, from current names of modules without the names of wrappers."""
    return [
        original_name(place.module) + place.parameter.removeprefix(PARAMETER) for place in skip_places(model)
    ]


def _digest(model: nn.Module) -> str:
    """Return a digest of the names and shapes of all parameters except λ, including tied parameters."""
    scales = {id(parameter) for parameter in skips_of(model).parameters()}
    shapes = sorted(
        (original_name(name), *parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) not in scales
    )
    return hashlib.sha256(repr(shapes).encode()).hexdigest()


def _another(model: nn.Module, folder: Path, got: str, fix: str = OWN_MODEL) -> SkipError:
    expected = f"λ of a {type(model).__name__} with the residual mixers of this model"
    return SkipError(f"skips in {folder}", expected=expected, got=got, fix=fix)
