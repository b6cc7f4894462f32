"""The model a command is given: by Hub name, folder or Python factory."""

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.cli.device_maps import checked_device, placement
from rankwise.errors import InputError, did_you_mean, first_line

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


ASSETS = Path(__file__).parents[1] / "assets"
"""The bundled models, as `python -m experiments.train_demo` writes them."""


def demo_model() -> Path:
    """Return the folder of the bundled demo, a small trained language model."""
    return ASSETS / "demo"


def demo_tost_model() -> Path:
    """Return the folder of the demo's twin, a ToST language model trained in the same way."""
    return ASSETS / "demo_tost"


def demo_text() -> Path:
    """Return the demo's text, 40 kilobytes of "The Taming of the Shrew" that the demo was not trained on."""
    return demo_model() / "text.txt"


@dataclass
class Subject:
    """A model ready to be audited, and how its inputs are made."""

    model: nn.Module
    name: str
    revision: str = ""
    source: str = ""
    """Where tokenizer and image processor are loaded from; empty for a factory's model."""
    batches: Iterable[Any] | None = None
    """What a factory brought along."""
    notes: list[str] = field(default_factory=list)
    trust_remote_code: bool = False
    tokenizer: str = ""
    """Where the tokenizer lies, if not beside the model."""
    drawn: tuple[str, ...] = ()
    """Weights that are not in the checkpoint: they are random, and others at each start."""

    @property
    def reads(self) -> str:
        """The model's main input: ``input_ids``, ``pixel_values``, …; ``input_ids`` where it does not say."""
        return str(getattr(self.model, "main_input_name", "input_ids"))


def load_subject(
    spec: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    offload_folder: Path | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> Subject:
    """Load a model in evaluation mode.

    Args:
        spec: a Hugging Face name or folder, or ``module.py:factory``, where the factory takes nothing and
            returns a module, or a module and its batches.
        revision: branch, tag or commit on the Hub.
        dtype: ``auto`` keeps the checkpoint's; else one of `DTYPES`.
        device: where to put it, such as ``cpu`` (where nothing is said) or ``cuda:0``.
        device_map: how transformers and accelerate spread it over devices: ``auto``, ``balanced``,
            ``sequential``, a device, or JSON ``{"module": "device", …}``.
        offload_folder: where weights go that the device map puts on the disk.
        trust_remote_code: let code that comes with the model run.
        tokenizer: folder or Hugging Face name of the tokenizer, where the model has none beside it.

    Raises:
        InputError: if there is no such model, or it cannot be loaded as asked.
    """
    target = checked_device(device or "cpu")
    placed = placement(spec, device, device_map, offload_folder)
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(
            f"--dtype {dtype}",
            expected="auto or a dtype",
            got=dtype,
            fix=did_you_mean(dtype, ["auto", *DTYPES]),
        )
    path, _, factory = spec.rpartition(":")
    if path.endswith(".py"):
        subject = _from_factory(Path(path), factory)
        if dtype != "auto":
            subject.model.to(DTYPES[dtype])
    else:
        subject = _from_transformers(spec, revision, dtype, trust_remote_code, placed)
    subject.tokenizer = tokenizer or ""
    if placed:
        subject.model.eval()
        return subject
    try:
        subject.model.eval().to(target)
    except RuntimeError as error:
        raise InputError(
            f"--device {device}",
            expected="a device that takes the model",
            got=first_line(error),
            fix="Use --device cpu, or --dtype bfloat16 to halve its size.",
        ) from error
    return subject


def _from_factory(path: Path, name: str) -> Subject:
    if not path.is_file():
        raise InputError(
            f"model {path}:{name}", expected="a Python file", got="no such file", fix="Check the path."
        )
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise InputError(
            f"model {path}:{name}", expected="a Python file", got="something else", fix="Check the path."
        )
    module = importlib.util.module_from_spec(module_spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        module_spec.loader.exec_module(module)
        factory = getattr(module, name, None)
        if not callable(factory):
            known = [
                key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
            ]
            raise InputError(
                f"model {path}:{name}",
                expected="a function of that name",
                got="none",
                fix=did_you_mean(name, known),
            )
        made = factory()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"model {path}:{name}",
            expected="a factory that takes nothing and returns a module",
            got=f"{type(error).__name__}: {error}",
            fix=f"`python {path}` shows where it fails; what runs as a script belongs under __main__.",
        ) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    model, batches = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model {path}:{name}",
            expected="a torch.nn.Module, or a pair of one and its batches",
            got=type(made).__name__,
            fix="Return the model itself from the factory.",
        )
    return Subject(model, f"{path}:{name}", batches=batches)


def _from_transformers(
    spec: str, revision: str | None, dtype: str, trust_remote_code: bool, placed: dict[str, Any]
) -> Subject:
    import transformers

    from rankwise import models  # known to transformers from here on
    from rankwise.compression import auto_model  # noqa: F401  (so are compressed models)
    from rankwise.data.hub import need_hub

    works = "a folder with config.json and weights, a Hugging Face name, or module.py:factory"
    if not Path(spec).exists():
        need_hub(f"model {spec}", expected=works, fix="Give the path of a downloaded model.")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    try:
        config = transformers.AutoConfig.from_pretrained(spec, **options)
        homes = (transformers, models)
        named = [getattr(home, name, None) for name in config.architectures or [] for home in homes]
        auto = next((kind for kind in named if kind is not None), transformers.AutoModel)
        if auto is not transformers.AutoModel:
            options.pop("trust_remote_code")
        options |= placed
        model, loading = auto.from_pretrained(
            spec, dtype=dtype if dtype == "auto" else DTYPES[dtype], output_loading_info=True, **options
        )
    except Exception as error:  # transformers raises OSError, ValueError, SafetensorError, KeyError, …
        raise InputError(
            f"model {spec}",
            expected=works,
            got=f"{type(error).__name__}: {first_line(error)}",
            fix=_loading_fix(error),
        ) from error
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # one pass over whole texts needs no cache
    commit = str(getattr(config, "_commit_hash", None) or revision or "")
    subject = Subject(model, spec, commit, spec, trust_remote_code=trust_remote_code)
    missing = sorted(loading.get("missing_keys", ()))
    subject.drawn = tuple(missing)
    if missing:
        subject.notes.append(
            f"{len(missing)} weights are not in the checkpoint and random, among them {missing[0]}"
        )
    return subject


def _loading_fix(error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return "Its code is not part of transformers: read it, then pass --trust-remote-code."
    if "offload_folder" in text:
        return "Not all of it fits into memory: pass --offload-folder DIR for the rest."
    if "token" in text.lower() and ("gated" in text.lower() or "401" in text):
        return "Log in with `hf auth login` after its owners have granted access."
    from huggingface_hub import constants

    if "couldn't connect" in text and constants.is_offline_mode():
        return (
            "HF_HUB_OFFLINE is set and nothing of this name was downloaded before: unset it to download, or "
            "give the path of a folder."
        )
    return (
        "Check the name; offline, give the path of a downloaded model; for a model of your own, "
        "module.py:factory."
    )
