"""What all tests share: where they run, from which seed, and that they stay offline and reproducible."""

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
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

SEED = 0
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"
DTYPES = ("float64", "float32", "float16", "bfloat16")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Choose where the tests that ask for it run, and in which precision."""
    group = parser.getgroup("rankwise")
    group.addoption("--device", default="cpu", help="device of the `device` fixture (default: cpu)")
    group.addoption(
        "--dtype",
        default="float64",
        choices=DTYPES,
        help="dtype of the `dtype` fixture; float64 makes disagreements plain (default)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One thread: the tests are many small operations, and the workers share the cores."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_finish(session: pytest.Session) -> None:
    """No collection of garbage looks again at modules and tests, which all stay."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What was frozen can be let go at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where to run, from ``--device``; skipped where the machine has none."""
    chosen = torch.device(request.config.getoption("--device"))
    try:
        torch.zeros(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"no device {chosen}: {error}")
    return chosen


@pytest.fixture(scope="session")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The precision to test in, from ``--dtype``."""
    return getattr(torch, request.config.getoption("--dtype"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    if torch.accelerator.is_available():
        torch.manual_seed(SEED)
    else:  # the other writes down the stack for each kind of device that is not there
        torch.default_generator.manual_seed(SEED)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout, where there is one."""
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
