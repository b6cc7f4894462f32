"""The bundled demo: a small trained language model, its ToST twin, and a text they were not trained on.

Made by ``experiments/train_demo.py``; the model card is ``demo/README.md``.
"""

from importlib.resources import files
from pathlib import Path


def demo_model() -> Path:
    """Find the folder of the demo model; ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it.

    Examples:
        >>> (demo_model() / "config.json").exists()
        True
    """
    return Path(str(files(__name__) / "demo"))


def demo_tost_model() -> Path:
    """Find the folder of the demo's twin, a ToST language model trained by the same recipe.

    Examples:
        >>> (demo_tost_model() / "config.json").exists()
        True
    """
    return Path(str(files(__name__) / "demo_tost"))


def demo_text() -> Path:
    """Find the demo's text: 40 kilobytes of The Taming of the Shrew, from the validation part.

    Examples:
        >>> demo_text().read_text(encoding="utf-8").splitlines()[0]
        'GREMIO:'
    """
    return demo_model() / "text.txt"
