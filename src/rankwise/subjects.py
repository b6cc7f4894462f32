"""What a command is pointed at: a model by Hub name, folder or Python factory, and what to feed it."""

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.errors import InputError, did_you_mean

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


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

    @property
    def reads(self) -> str:
        """The model's main input: ``input_ids``, ``pixel_values``, …; ``input_ids`` where it does not say."""
        return str(getattr(self.model, "main_input_name", "input_ids"))


def load_subject(
    spec: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> Subject:
    """Load a model in evaluation mode.

    Args:
        spec: a Hugging Face name or folder, or ``module.py:factory``, where the factory takes nothing and
            returns a module, or a module and its batches.
        revision: branch, tag or commit on the Hub.
        dtype: ``auto`` keeps the checkpoint's; else one of `DTYPES`.
        device: where to put it, such as ``cpu`` or ``cuda:0``.
        trust_remote_code: let code that comes with the model run.
        tokenizer: folder or Hugging Face name of the tokenizer, where the model has none beside it.

    Raises:
        InputError: if there is no such model, or it cannot be loaded as asked.
    """
    target = _device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(
            f"--dtype {dtype}",
            wanted="auto or a dtype",
            got=dtype,
            fix=did_you_mean(dtype, ["auto", *DTYPES]),
        )
    path, _, factory = spec.rpartition(":")
    if path.endswith(".py"):
        subject = _from_factory(Path(path), factory)
        if dtype != "auto":
            subject.model.to(DTYPES[dtype])
    else:
        subject = _from_transformers(spec, revision, dtype, trust_remote_code)
    subject.tokenizer = tokenizer or ""
    try:
        subject.model.eval().to(target)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device {device}",
            wanted="a device that takes the model",
            got=_first_line(error),
            fix="Use --device cpu, or --dtype bfloat16 to halve its size.",
        ) from error
    return subject


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"--device {name}",
            wanted="a device of this machine",
            got=_first_line(error),
            fix="Use cpu, or cuda where PyTorch was installed with it.",
        ) from error
    return device


def _from_factory(path: Path, name: str) -> Subject:
    if not path.is_file():
        raise InputError(
            f"model {path}:{name}", wanted="a Python file", got="no such file", fix="Check the path."
        )
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise InputError(
            f"model {path}:{name}", wanted="a Python file", got="something else", fix="Check the path."
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
                wanted="a function of that name",
                got="none",
                fix=did_you_mean(name, known),
            )
        made = factory()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"model {path}:{name}",
            wanted="a factory that takes nothing and returns a module",
            got=f"{type(error).__name__}: {error}",
            fix=f"`python {path}` shows where it fails; what runs as a script belongs under __main__.",
        ) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    model, batches = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model {path}:{name}",
            wanted="a torch.nn.Module, or a pair of one and its batches",
            got=type(made).__name__,
            fix="Return the model itself from the factory.",
        )
    return Subject(model, f"{path}:{name}", batches=batches)


def _from_transformers(spec: str, revision: str | None, dtype: str, trust_remote_code: bool) -> Subject:
    import transformers

    from rankwise import models  # known to transformers from here on
    from rankwise.compression import auto_model  # noqa: F401  (so are compressed models)
    from rankwise.data.hub import need_hub

    works = "a folder with config.json and weights, a Hugging Face name, or module.py:factory"
    if not Path(spec).exists():
        need_hub(f"model {spec}", wanted=works, fix="Give the path of a downloaded model.")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    try:
        config = transformers.AutoConfig.from_pretrained(spec, **options)
        homes = (transformers, models)
        named = [getattr(home, name, None) for name in config.architectures or [] for home in homes]
        auto = next((kind for kind in named if kind is not None), transformers.AutoModel)
        if auto is not transformers.AutoModel:
            options.pop("trust_remote_code")
        model, loading = auto.from_pretrained(
            spec, dtype=dtype if dtype == "auto" else DTYPES[dtype], output_loading_info=True, **options
        )
    except Exception as error:  # transformers raises OSError, ValueError, SafetensorError, KeyError, …
        raise InputError(
            f"model {spec}",
            wanted=works,
            got=f"{type(error).__name__}: {_first_line(error)}",
            fix=_loading_fix(error),
        ) from error
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # one pass over whole texts needs no cache
    commit = str(getattr(config, "_commit_hash", None) or revision or "")
    subject = Subject(model, spec, commit, spec, trust_remote_code=trust_remote_code)
    missing = sorted(loading.get("missing_keys", ()))
    if missing:
        subject.notes.append(
            f"{len(missing)} weights are not in the checkpoint and random, among them {missing[0]}"
        )
    return subject


def _loading_fix(error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return "Its code is not part of transformers: read it, then pass --trust-remote-code."
    if "token" in text.lower() and ("gated" in text.lower() or "401" in text):
        return "Log in with `hf auth login` after its owners have granted access."
    return (
        "Check the name; offline, give the path of a downloaded model; for a model of your own, "
        "module.py:factory."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Inputs:
    """Batches for a subject, and in words what they are."""

    batches: Iterable[Any]
    data: str
    notes: tuple[str, ...] = ()
    tokenizer: Any = None
    """What turned text into ids, where text is read."""


def inputs_for(
    subject: Subject,
    *,
    text: Path | None = None,
    images: Path | None = None,
    dataset: str | None = None,
    tokens: int = 256,
    sequences: int = 8,
    batch_size: int = 4,
) -> Inputs:
    """Make batches of what the user points at, in the form the subject reads.

    Args:
        subject: the model.
        text: a text file, or ``.jsonl`` with one text a line.
        images: a folder of pictures, or one.
        dataset: ``NAME[:split:column]``.
        tokens: tokens of a sequence, cut to what the model can take.
        sequences: how many sequences at most.
        batch_size: sequences in a batch.

    Raises:
        InputError: if nothing or too much is given, it cannot be read, or it is not what the model reads.
    """
    given = {"--text": text, "--images": images, "--dataset": dataset}
    chosen = [name for name, value in given.items() if value is not None]
    if not chosen and subject.batches is not None:
        return Inputs(subject.batches, f"batches of {subject.name}")
    if len(chosen) != 1:
        raise InputError(
            "data",
            wanted="one of --text FILE, --images DIR, --dataset NAME[:split:column]",
            got=" and ".join(chosen) or "none",
            fix="The model reads pictures: give --images."
            if subject.reads == "pixel_values"
            else "Give --text FILE.",
        )
    if images is not None:
        return _pictures(subject, images, sequences, batch_size)
    return _texts(subject, text, dataset, tokens, sequences, batch_size)


def _pictures(subject: Subject, images: Path, sequences: int, batch_size: int) -> Inputs:
    from rankwise.data import load_image_processor, read_images
    from rankwise.data.processors import plain_processor

    if subject.source and subject.reads == "input_ids":
        raise InputError(
            f"model {subject.name}",
            wanted="a model that reads pictures",
            got="one that reads text",
            fix="Give --text.",
        )
    config = getattr(subject.model, "config", None)
    if subject.source:
        processor = load_image_processor(
            subject.source,
            config=config,
            revision=subject.revision or None,
            trust_remote_code=subject.trust_remote_code,
        )
    else:
        processor = plain_processor({"size": 224}, note="pictures resized to 224×224, mean and std 0.5")
    mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
    batches: Iterable[Any] = read_images(
        images, processor, sequences=sequences, batch_size=batch_size, mode=mode
    )
    if not subject.source:
        batches = (batch["pixel_values"] for batch in batches)
    note = getattr(processor, "note", "")
    return Inputs(batches, f"{images} (pictures)", (note,) if note else ())


def _texts(
    subject: Subject, path: Path | None, dataset: str | None, tokens: int, sequences: int, batch_size: int
) -> Inputs:
    from rankwise.data import dataset_texts, load_text, longest_sequence, model_batches

    if subject.reads != "input_ids":
        raise InputError(
            f"model {subject.name}",
            wanted="a model that reads token ids",
            got=f"one that reads {subject.reads}",
            fix="Give --images DIR."
            if subject.reads == "pixel_values"
            else "Use module.py:factory with batches.",
        )
    texts = load_text(path) if path is not None else dataset_texts(str(dataset))
    notes: list[str] = []
    if subject.source or subject.tokenizer:
        tokenizer = _tokenizer(subject)
    else:
        tokenizer = ByteTokenizer()
        notes.append("text read as bytes (ids 0 to 255): a factory's model has no tokenizer")
    model = subject.model
    limit = longest_sequence(model)
    shown = tokens if limit is None else min(tokens, limit)
    made, said = model_batches(
        model, texts, tokenizer, tokens=tokens, sequences=sequences, batch_size=batch_size
    )
    data = f"{path if path is not None else dataset}, up to {shown} tokens"
    return Inputs(made, data, (*notes, *said), tokenizer)


def _tokenizer(subject: Subject) -> Any:
    from transformers import AutoTokenizer

    home = subject.tokenizer or subject.source
    revision = "main" if subject.tokenizer else subject.revision or "main"
    try:
        return AutoTokenizer.from_pretrained(
            home, revision=revision, trust_remote_code=subject.trust_remote_code
        )
    except Exception as error:
        bare = Path(home).is_dir() and not any(_of_a_tokenizer(file.name) for file in Path(home).iterdir())
        raise InputError(
            f"tokenizer {home}" if subject.tokenizer else f"tokenizer of {subject.name}",
            wanted="a folder with the files of a tokenizer, or a Hugging Face name",
            got=f"the folder {home} without one" if bare else f"{type(error).__name__}: {_first_line(error)}",
            fix="Name another: --tokenizer FOLDER (or a Hugging Face name); or save it there: "
            "`tokenizer.save_pretrained(folder)`.",
        ) from error


def _of_a_tokenizer(file: str) -> bool:
    return any(part in file for part in ("tokenizer", "vocab", "merges", "spiece", "sentencepiece"))


class ByteTokenizer:
    """Text as its UTF-8 bytes, for models that bring no tokenizer."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        """The bytes of each text."""
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, ids: list[int]) -> str:
        """The text of some bytes; � where they are no whole characters.

        Args:
            ids: bytes.
        """
        return bytes(ids).decode(errors="replace")
