"""Load the model that a command names (Hub name, folder or Python factory) onto one or more devices."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rankwise._internals.files import writable_folder
from rankwise._internals.forward import config_value, free_memory
from rankwise.cli.load_gguf import as_plain_model, gguf_location, read_once
from rankwise.cli.output import quiet_libraries
from rankwise.errors import InputError, first_line, instance_of, one_of
from rankwise.skips import load_skips

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}
MODELS = "a folder with config.json and weights, a Hugging Face name, a GGUF file, or module.py:factory"
OTHER_FOLDERS = {
    "adapter_config.json": (
        "an adapter of peft alone",
        "Merge it: `peft.AutoPeftModel.from_pretrained({0!r}).merge_and_unload().save_pretrained(NEW)`.",
    ),
    "model_index.json": ("a pipeline of diffusers", "Pass one of its parts, such as {0}/text_encoder."),
    "modules.json": ("a model of sentence-transformers", "Pass its transformer, such as {0}/0_Transformer."),
    "*.gguf": ("a folder with GGUF files", "Pass one of the files, such as {0}/model.gguf."),
}
"""What a folder without config.json holds, and what to do, by the pattern of a file in it."""
ASSETS = Path(__file__).parents[1] / "assets"
"""Folder with the bundled models, which `python -m experiments run train_demo` writes."""


def demo_model() -> Path:
    """Return the folder of the bundled demo model, a small trained language model."""
    return ASSETS / "demo"


def demo_tost_model() -> Path:
    """Return the folder of the second demo model, a ToST language model trained in the same way."""
    return ASSETS / "demo_tost"


def demo_text() -> Path:
    """Return the path of the demo's text: 40 kB of "The Taming of the Shrew", not used in training."""
    return demo_model() / "text.txt"


@dataclass
class LoadedModel:
    """Model in evaluation mode, with the information that is required to prepare its inputs."""

    model: nn.Module
    name: str
    revision: str = ""
    source: str = ""
    """Name or folder with the tokenizer and the image processor; empty for a factory's model."""
    batches: Iterable[Any] | None = None
    """Batches that a factory returned with the model."""
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """Function `loss(model, batch)` in the file of a factory."""
    notes: list[str] = field(default_factory=list)
    trust_remote_code: bool = False
    tokenizer: str = ""
    """Folder or name of a tokenizer that is not saved with the model."""
    random_weights: tuple[str, ...] = ()
    """Names of weights that are not in the checkpoint, and therefore random at each start."""
    random_blocks: list[str] = field(default_factory=list)
    """Names in ``random_weights`` that belong to blocks or embeddings."""
    part: str = ""
    """Name of the part of the named model that this is. Only audits select a part, by the kind of data."""
    use_cache: bool | None = None
    """Value of ``use_cache`` in the checkpoint; `load_model` turns the cache off."""

    @property
    def input_name(self) -> str:
        """Name of the model's main input, such as `pixel_values`; by default `input_ids`."""
        return str(getattr(self.model, "main_input_name", "input_ids"))

    def restore_use_cache(self) -> None:
        """Set `use_cache` as in the checkpoint, before the model is saved."""
        if self.use_cache is not None:
            config: Any = self.model.config
            config.use_cache = self.use_cache

    def part_for(self, kind: Literal["text", "vision"]) -> "LoadedModel":
        """Return the text or vision part of a model such as CLIP. Return any other model unchanged."""
        name = f"{kind}_model"
        if not self.source or not all(hasattr(self.model, tower) for tower in ("text_model", "vision_model")):
            return self
        note = f"only {name} of {type(self.model).__name__} was audited: the part that reads this data"
        missing = tuple(weight.removeprefix(f"{name}.") for weight in self.random_weights)
        tower = self.model.get_submodule(name)
        notes = [*self.notes, note]
        return replace(self, model=tower, notes=notes, random_weights=missing, part=name)


def load_model(
    spec: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    offload_folder: Path | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> LoadedModel:
    """Load a model in evaluation mode: NAME or NAME@REVISION on the Hub, folder, GGUF file, or factory.

    λ-skips that are saved in the folder are applied. A factory, `module.py:factory`, takes no arguments. It
    returns a module, or a module and its batches. The default device is the CPU. `device_map` is a name or
    device that transformers knows, or JSON such as `{"module": "device", …}`. With `offload_folder`, a named
    map leaves weights on the disk that exceed half of the free memory.
    """
    quiet_libraries()
    placement = check_loading(spec, dtype, device, device_map, offload_folder)
    path, factory = split_factory(spec)
    if path:
        loaded = _from_factory(Path(path), factory)
        if dtype != "auto":
            loaded.model.to(DTYPES[dtype])
    else:
        loaded = _from_transformers(*split_revision(spec), dtype, trust_remote_code, placement)
    loaded.tokenizer = tokenizer or ""
    loaded.model.eval()
    try:
        if not placement:
            loaded.model.to(device or "cpu")
    except RuntimeError as error:
        fix = "Use --device cpu, or --dtype bfloat16 to halve its size."
        got = first_line(error)
        raise InputError(f"--device {device}", expected="a device for the model", got=got, fix=fix) from error
    if loaded.source and (skips := load_skips(loaded.model, loaded.source, missing_ok=True)):
        loaded.notes.append(f"with the {len(skips)} λ-skips saved next to the model")
    return loaded


def split_factory(spec: str) -> tuple[str, str]:
    """Return the file and the function of `module.py:factory`; two empty strings for any other model."""
    path, _, name = spec.rpartition(":")
    return (path, name) if path.endswith(".py") else ("", "")


def split_revision(spec: str) -> tuple[str, str]:
    """Return the name and the revision of NAME@REVISION; an existing path or a factory has no revision.

    Raise `InputError` if NAME is a folder.
    """
    name, _, revision = spec.rpartition("@")
    if not name or split_factory(spec)[0] or Path(spec).exists():
        return spec, ""
    if Path(name).exists():
        fix = "Omit the revision: only models on the Hub have one."
        got = f"the folder {name}"
        raise InputError(f"revision {revision}", expected="a model on the Hub", got=got, fix=fix)
    return name, revision


def check_loading(
    spec: str, dtype: str, device: str | None, device_map: str | None, offload_folder: Path | None
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a device map, or an empty dict without a device map.

    Raise `InputError` if an option is wrong.
    """
    check_device(device or "cpu")
    one_of("--dtype", dtype, ["auto", *DTYPES])
    split_revision(spec)
    if device_map is None:
        if offload_folder is not None:
            subject, fix = f"--offload-folder {offload_folder}", "Add --device-map auto."
            raise InputError(subject, expected="--device-map next to it", got="none", fix=fix)
        return {}
    placement: dict[str, Any] = {"device_map": device_map}
    if device_map.startswith("{"):
        try:
            placement["device_map"] = json.loads(device_map)
        except ValueError as error:
            subject, fix = f"--device-map {device_map}", "Quote it for the shell: --device-map '{…}'."
            raise InputError(subject, expected="JSON", got=str(error), fix=fix) from error
    if offload_folder is not None:
        writable_folder(offload_folder, "--offload-folder")
        placement["offload_folder"] = str(offload_folder)
    return placement


def _from_factory(path: Path, name: str) -> LoadedModel:
    subject, home = f"model {path}:{name}", str(path.parent.resolve())
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, home)
    try:
        module_spec.loader.exec_module(module)
        result = getattr(module, name)()
    except (Exception, SystemExit) as error:
        expected, got = "a factory without arguments in a Python file", f"{type(error).__name__}: {error}"
        fix = f"`python {path}` shows where it fails; code of a script belongs under __main__."
        raise InputError(subject, expected=expected, got=got, fix=fix) from error
    finally:
        sys.path.remove(home)
    model, batches = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    expected = "a torch.nn.Module, or a pair of one and its batches"
    instance_of(subject, model, nn.Module, expected, fix="Return the model from the factory.")
    return LoadedModel(model, f"{path}:{name}", batches=batches, loss=getattr(module, "loss", None))


def _from_transformers(
    spec: str, revision: str, dtype: str, trust_remote_code: bool, placement: dict[str, Any]
) -> LoadedModel:
    import transformers

    from rankwise import models  # registers ToST models with transformers
    from rankwise.compression import save  # registers compressed models

    for file, (got, fix) in OTHER_FOLDERS.items():
        if next(Path(spec).glob(file), None) and not (Path(spec) / "config.json").is_file():
            raise InputError(f"model {spec}", expected=MODELS, got=got, fix=fix.format(spec))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    home, gguf_file = gguf_location(spec)
    options |= gguf_file
    try:
        with read_once(spec) as gguf:
            config = transformers.AutoConfig.from_pretrained(home, **options)
            homes = (transformers, models)
            named = [getattr(home, name, None) for name in config.architectures or [] for home in homes]
            is_causal = gguf and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
            kind = next((kind for kind in named if kind is not None), auto)
            if kind is not auto:
                options.pop("trust_remote_code")  # only Auto classes have this argument
            options |= {"dtype": dtype if dtype == "auto" else DTYPES[dtype], "output_loading_info": True}
            if gguf and hasattr(transformers, "GgufConfig"):  # versions without it always dequantize
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            if "offload_folder" in placement and isinstance(placement["device_map"], str):
                from accelerate.utils import get_max_memory

                placement["max_memory"] = get_max_memory() | {"cpu": free_memory(torch.device("cpu")) // 2}
            model, loading = kind.from_pretrained(home, **options, **placement)
            notes = [as_plain_model(model, gguf)] if gguf else []
    except InputError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, SafetensorError, KeyError, …
        got = " ".join(f"{type(error).__name__}: {error}".split())
        fix = "Save it again: `model.save_pretrained(folder)`" if Path(spec).exists() else "Check the name"
        if gguf_file:
            fix = "Pass the Hugging Face model that the file was made from"
        fix += ", pass module.py:factory, or add the option that the message names, as --trust-remote-code."
        if "No space left" in got and placement.get("offload_folder"):
            fix = "Choose an --offload-folder on a disk with room for the weights."
        raise InputError(f"model {spec}", expected=MODELS, got=got, fix=fix) from error
    on_disk = [weight.numel() * weight.element_size() for weight in model.parameters() if weight.is_meta]
    if (largest := max(on_disk, default=0)) > (free := free_memory(torch.device("cpu"))):
        expected, got = f"{largest / 1e9:.1f} GB for the largest weight", f"{free / 1e9:.1f} GB that are free"
        raise InputError("memory", expected=expected, got=got, fix="Free memory, or use --dtype bfloat16.")
    if save.structure_of(model).changes:
        save.check_complete(f"model {spec}", loading["missing_keys"])
    use_cache = config_value(model, "use_cache")
    if use_cache is not None:
        model.config.use_cache = False  # a cache is useless for one pass over whole texts
    commit = str(config_value(config, "_commit_hash") or revision or "")
    missing = tuple(sorted(loading.get("missing_keys", ())))
    inside = _missing_in_blocks(f"model {spec}", model, missing, loading.get("unexpected_keys", ()))
    if missing:
        notes.append(f"{len(missing)} weights are not in the checkpoint and random, among them {missing[0]}")
    return LoadedModel(
        model, spec, commit, source=spec, notes=notes, trust_remote_code=trust_remote_code,
        random_weights=missing, random_blocks=inside, use_cache=use_cache,
    )  # fmt: skip


def _missing_in_blocks(
    subject: str, model: nn.Module, missing: Sequence[str], extra: Iterable[str]
) -> list[str]:
    """Return the weights of blocks and embeddings that a checkpoint lacks. Print a warning if there are any.

    The output layer of a language model counts as an embedding. A new classifier causes no warning.

    Raise `InputError` if the checkpoint has none of the weights of the model.
    """
    from rankwise.tracing.block_finder import block_items

    if not missing:
        return []
    if {weight for weight, _ in model.named_parameters()} <= set(missing):
        expected = f"weights of {type(model).__name__}, such as {max(missing, key=len)}"
        got = f"none of them, but {max(extra, key=len, default='no weights')}"
        fix = "Check `architectures` in config.json, or remove a prefix from the names of all weights."
        raise InputError(subject, expected=expected, got=got, fix=fix)
    blocks = tuple(f"{name}." for name, of_one_class in block_items(model, None).items() if of_one_class)
    output = model.get_output_embeddings()  # type: ignore[operator]
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) or module is output:
            blocks += (f"{path}.",)
    if inside := [weight for weight in missing if weight.startswith(blocks)]:
        said = f"{len(inside)} weights of blocks or embeddings are not in the checkpoint and random, such as "
        print(f"rankwise: warning: {subject}: {said}{inside[0]}", file=sys.stderr)
    return inside


def check_device(name: str, option: str = "--device") -> torch.device:
    """Return a device, without allocating memory on it. Raise `InputError` if torch does not find it."""
    available = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        available += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    with suppress(RuntimeError):  # torch does not know this kind of device
        device = torch.device(name)
        if device.type == "cpu" or f"{device.type}:{device.index or 0}" in available:
            return device
    expected, got = "a device that torch sees", f"only {', '.join(available)} (torch {torch.__version__})"
    fix = "Use cpu, or install torch for your accelerator."
    raise InputError(f"{option} {name}", expected=expected, got=got, fix=fix)
