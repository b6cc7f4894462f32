"""Read GGUF files, the format of llama.cpp, through transformers, which dequantizes their weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.errors import InputError, first_line, need_package

UNPACKED = {"F64", "F32", "F16", "BF16"}
"""Types of GGUF tensors that are not quantized."""


def gguf_location(name: str) -> tuple[str, dict[str, str]]:
    """Return the folder and the arguments of `from_pretrained` that name a GGUF file in it.

    Any other model is returned unchanged, without arguments.

    Examples:
        >>> gguf_location("models/gemma.gguf"), gguf_location("gpt2")
        (('models', {'gguf_file': 'gemma.gguf'}), ('gpt2', {}))
    """
    path = Path(name)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (name, {})


@contextmanager
def read_once(name: str) -> Iterator[Any]:
    """Yield the `GGUFReader` of a GGUF file, which transformers uses inside the block; None for other models.

    transformers would parse the file two or three times, for many seconds each if the vocabulary is large.

    Raise `InputError` if the file is not one whole GGUF file, or a package is missing.
    """
    if not gguf_location(name)[1]:
        yield None
        return
    path, subject = Path(name), f"model {name}"
    if not path.is_file():
        got = "a folder" if path.is_dir() else "no such file"
        raise InputError(subject, expected="a GGUF file", got=got, fix="Check the path.")
    need_package("accelerate", subject, "gguf")
    gguf: Any = need_package("gguf", subject, "gguf")
    try:
        reader = _quick_reader(gguf.GGUFReader)(path)
    except Exception as error:  # of indices, shapes, characters or unknown types, wherever the file ends
        got = f"{type(error).__name__}: {first_line(error)}"
        fix = "If it is cut, download it again; if it is new, `pip install -U gguf`."
        raise InputError(subject, expected="a whole GGUF file", got=got, fix=fix) from error
    split = reader.fields.get("split.count")
    if split is not None and (parts := int(split.parts[split.data[0]][0])) > 1:
        fix = "Join them: `llama-gguf-split --merge FIRST_PART.gguf WHOLE.gguf`."
        raise InputError(subject, expected="a whole GGUF file", got=f"one of {parts} parts", fix=fix)
    original, gguf.GGUFReader = gguf.GGUFReader, lambda *_: reader
    try:
        yield reader
    finally:
        gguf.GGUFReader = original


def _quick_reader(kind: Any) -> Any:
    """Return a subclass that reads plain arrays, because slices of memory maps take four times as long."""
    import numpy as np

    class Reader(kind):
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, memory_map: Any) -> None:
            self._data = np.asarray(memory_map)

    return Reader


def as_plain_model(model: nn.Module, reader: Any) -> str:
    """Let transformers save a dequantized model like any other; return a note on the types of its weights."""
    if quantizer := getattr(model, "hf_quantizer", None):
        quantizer.remove_quantization_config(model)
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    read = "read" if UNPACKED.issuperset(types) else "dequantized"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"measured in {dtype}: weights of types {', '.join(types)} in the GGUF file were {read}"
