"""Files that lie beside the weights of a model and must lie beside those of the compressed one, too."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

SENTENCES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
"""Of sentence-transformers: what comes behind the model, and how texts are read."""
MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
"""Of each module behind the model, such as pooling."""


def copy_companions(source: str, revision: str, folder: Path) -> list[str]:
    """Copy tokenizer, image processor and the modules of sentence-transformers.

    Args:
        source: folder or Hugging Face name of the original.
        revision: of the Hub.
        folder: of the compressed model.

    Returns:
        Names of the modules of sentence-transformers that were copied; none for other models.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    for kind in (AutoTokenizer, AutoImageProcessor):
        with suppress(Exception):  # a model has one of them, or none
            kind.from_pretrained(source, revision=revision).save_pretrained(folder)
    for name in SENTENCES:
        _copy(source, revision, name, folder)
    modules = folder / "modules.json"
    if not modules.exists():
        return []
    names = [str(module.get("path", "")) for module in json.loads(modules.read_text(encoding="utf-8"))]
    inside = [name for name in names if name and Path(name).parts == (Path(name).name,) and name != ".."]
    for name in inside:
        (folder / name).mkdir(exist_ok=True)  # a module without files, such as normalisation, has its folder
        for file in MODULE_FILES:
            _copy(source, revision, f"{name}/{file}", folder)
    return inside


def _copy(source: str, revision: str, name: str, folder: Path) -> None:
    from transformers.utils import cached_file

    with suppress(OSError):  # it has no such file
        found = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if found:
            shutil.copyfile(found, folder / name)
