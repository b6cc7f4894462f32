"""Settings of all tests: device, dtype, random seed, no network; and fixtures."""

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports transformers
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "numba"))

import numpy as np
import pytest
import tests.typecheck  # noqa: F401 - before rankwise is imported
import torch
from hypothesis import settings
from typer.testing import CliRunner, Result

# Property tests are not timed: the first call of a decomposition loads libraries.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

SEED = 0
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"
DTYPES = ("float64", "float32", "float16", "bfloat16")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the device and the dtype of tests that use these fixtures."""
    group = parser.getgroup("rankwise")
    group.addoption("--device", default="cpu", help="device of the `device` fixture (default: cpu)")
    group.addoption(
        "--dtype",
        default="float64",
        choices=DTYPES,
        help="dtype of the `dtype` fixture; float64 makes disagreements plain (default)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Use one thread, because tests are many small operations and workers share the cores."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker waits for another at the end."""
    items.sort(key=lambda item: item.path.name != "test_tutorials.py")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude modules and tests, which are never freed, from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Include all objects in garbage collection again."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Device of ``--device``; skip the test if the machine does not have it."""
    chosen = torch.device(request.config.getoption("--device"))
    try:
        torch.zeros(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"no device {chosen}: {error}")
    return chosen


@pytest.fixture(scope="session")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Dtype of ``--dtype``."""
    return getattr(torch, request.config.getoption("--dtype"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Set the random seed, so that a test does not depend on the tests before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    if torch.accelerator.is_available():
        torch.manual_seed(SEED)
    else:  # `manual_seed` records a stack trace for each missing kind of device
        torch.default_generator.manual_seed(SEED)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data next to the checkout; skip the test if there is none."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no shared data at {SHARED_DATA}")
    return SHARED_DATA


TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 40


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with 2 layers and 2 heads of width 16, and its tokenizer."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(path)
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in `tmp_path`, which has text.txt; errors for users are the result's exception."""
    from rankwise.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "text.txt").write_text(TEXT)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
