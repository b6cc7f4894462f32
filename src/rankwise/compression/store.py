"""Compressed models in folders."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rankwise._internals.files import parse_json, write_file
from rankwise.compression.auto_model import KEY, NAME, note_structure
from rankwise.compression.record import Compression
from rankwise.compression.structure import read_structure, rebuild, structure_of
from rankwise.errors import CompressionError, InputError

WEIGHTS, STRUCTURE, RECORD = "model.safetensors", "structure.json", "compression.json"


def save_compressed(model: nn.Module, folder: str | Path, record: Compression | None = None) -> Path:
    """Write a compressed model: weights in safetensors, structure in JSON, and the record of what was done.

    A model of transformers is written by its own ``save_pretrained``, which also works alone: the structure
    is in ``config.json``. Any other module gets ``model.safetensors`` and ``structure.json``.

    Args:
        model: the model.
        folder: where to; it is made if it is missing.
        record: what `compress` gave.

    Returns:
        The folder.

    Raises:
        CompressionError: if the model is not compressed.
        InputError: if the folder has files in it, or cannot be written.
    """
    folder, structure = Path(folder), structure_of(model)
    if not structure.changes:
        raise CompressionError(
            f"model {type(model).__name__}",
            expected="a compressed model",
            got="one without narrowed layers",
            fix="Compress it first: `rw.compress(model, batches)`.",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"folder {folder}",
            expected="a new or empty folder",
            got="one with files in it" if folder.is_dir() else "a file",
            fix="Choose another name.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(model, "save_pretrained") and hasattr(model, "config"):
            note_structure(model)
            save: Any = model.save_pretrained
            save(folder)
        else:
            weights = {
                name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()
            }
            write_file(folder / WEIGHTS, lambda partial: save_file(weights, partial), "weights")
            write_file(folder / STRUCTURE, structure.model_dump_json(), "structure")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"folder {folder}",
            expected="a folder that can be written",
            got=str(error),
            fix="Choose a folder you may write to and that has room.",
        ) from error
    if record is not None:
        record.save(folder / RECORD)
    return folder


def load_compressed(folder: str | Path, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """Load a compressed model, in evaluation mode.

    After ``from rankwise.compression import load_compressed``, ``AutoModel.from_pretrained(folder)`` also
    loads compressed models of transformers.

    Args:
        folder: where `save_compressed` or ``save_pretrained`` wrote it.
        model: for a module that is none of transformers: a fresh one of the same class and sizes, not
            compressed; it is changed in place.
        options: for ``from_pretrained``, such as ``dtype=torch.bfloat16``.

    Raises:
        CompressionError: if the folder holds no compressed model, or the weights do not fit.
        InputError: if a file cannot be read.

    Examples:
        >>> import tempfile, torch, rankwise as rw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)).eval()
        >>> ids = torch.randint(0, 50, (2, 24))
        >>> done = rw.compress(model, [{"input_ids": ids}], keep=0.5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     again = rw.load_compressed(folder)
        >>> bool(torch.equal(model(ids).logits, again(ids).logits))
        True
    """
    folder = Path(folder)
    if model is not None:
        return _load_into(folder, model)
    config_file = folder / "config.json"
    content = _read_json(config_file)
    noted = content.get(KEY) if isinstance(content, dict) else None
    names = content.get("architectures") if isinstance(content, dict) else None
    if not isinstance(noted, dict) or noted.get("quant_method") != NAME or not names:
        raise CompressionError(
            f"folder {folder}",
            expected="a compressed model of transformers",
            got="a configuration that names no compression",
            fix="Load it with `AutoModel.from_pretrained`; or pass `model=` for a module of your own.",
        )
    read_structure(noted.get("structure"), str(config_file))
    import transformers

    known = getattr(transformers, str(names[0]), None)
    if known is None:
        raise CompressionError(
            f"folder {folder}",
            expected="a class of transformers",
            got=str(names[0]),
            fix="Build the model yourself and pass it as `model=`.",
        )
    loaded = known.from_pretrained(folder, **options)
    assert isinstance(loaded, nn.Module)
    return loaded.eval()


def _load_into(folder: Path, model: nn.Module) -> nn.Module:
    structure = read_structure(_read_json(folder / STRUCTURE), str(folder / STRUCTURE))
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"weights {folder / WEIGHTS}",
            expected="a file that `save_compressed` wrote",
            got=str(error),
            fix="Save the model again.",
        ) from error
    rebuild(model, structure)
    try:
        with torch.no_grad():
            model.load_state_dict(weights)
    except RuntimeError as error:
        raise CompressionError(
            f"weights {folder / WEIGHTS}",
            expected=f"those of a {type(model).__name__} of the same sizes",
            got=str(error).splitlines()[-1].strip(),
            fix="Build the model as it was built when it was saved.",
        ) from error
    return model.eval()


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"file {path}",
            expected="JSON of a compressed model",
            got="no such file" if isinstance(error, FileNotFoundError) else str(error),
            fix="Check the folder; of a module that is none of transformers, pass `model=`.",
        ) from error
