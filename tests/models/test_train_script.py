"""The scripts of docs/how-to/train.md train a ToST, resume from the newest whole checkpoint, and generate."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rankwise.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train.md"
Run = Callable[[str], str]
SCRIPTS = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script in this process, which has loaded the libraries."""
    pytest.importorskip("accelerate")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)

    def run(script: str) -> str:
        (tmp_path / "train.py").write_text(script)
        runpy.run_path("train.py", run_name="__main__")
        return capsys.readouterr().out

    return run


def run_anew(script: str, folder: Path) -> None:
    """Run a script in a new process."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(folder / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def shortened(script: str, size: str, steps: int) -> str:
    """Return a script of a few steps, with its periodic work in every second step."""
    assert len(script.splitlines()) <= 45
    script = re.sub(r"_steps=\d00|every=\d00", lambda found: f"{found[0].split('=')[0]}=2", script)
    small = re.sub(r"(OUT, \w+, STEPS = Path\(.+\)), .+", rf"\1, {size}, {steps}", script)
    assert f"{size}, {steps}\n" in small
    return small


def test_the_script_of_a_language_model_trains_resumes_and_generates(tmp_path: Path, run_here: Run) -> None:
    """After 3 steps there are traces of killed processes; then training continues to 5 steps."""
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question. " * 200)
    out = tmp_path / "tost"
    run_anew(shortened(SCRIPTS[0], "16", 3), tmp_path)
    path = out / "checkpoint-3" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"].insert(0, {"step": 0, "from": "the first run"})
    path.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    for killed, content in (("checkpoint-4", path.read_text()[:-20]), ("checkpoint-20", None)):
        (out / killed).mkdir()
        if content is not None:
            (out / killed / "trainer_state.json").write_text(content)
    run_here(shortened(SCRIPTS[0], "16", 5))
    resumed = json.loads((out / "checkpoint-5" / "trainer_state.json").read_text())
    assert resumed["log_history"][0] == {"step": 0, "from": "the first run"}
    assert sorted(path.name for path in (out / "rank").glob("step-*")) == ["step-0", "step-2", "step-4"]
    audited = CliRunner().invoke(
        app, ["audit", str(out / "checkpoint-5"), "--text", "book.txt", "--tokens", "16"]
    )
    assert audited.exit_code == 0, audited.output
    small = SCRIPTS[1].replace("max_new_tokens=120", "max_new_tokens=5")
    assert small != SCRIPTS[1]
    assert run_here(small).startswith("ROMEO:")


def test_the_script_of_a_classifier_of_images_trains_and_resumes_in_the_same_lines(
    tmp_path: Path, run_here: Run
) -> None:
    image = pytest.importorskip("PIL.Image")
    for shade, name in ((40, "dark"), (200, "light")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for at in range(20):
            image.new("RGB", (20, 24), (shade + at,) * 3).save(tmp_path / "pictures" / name / f"{at}.png")
    run_here(shortened(SCRIPTS[2], "8", 3))
    assert sorted(path.name for path in tmp_path.glob("tost-images/rank/step-*")) == ["step-0", "step-2"]
    resuming = re.compile(r"^states = .+\n^last = .+\n^trainer\.train\(.+\n", re.MULTILINE)
    assert len({resuming.search(script)[0] for script in (SCRIPTS[0], SCRIPTS[2])}) == 1
    assert all("resume=True).attach(trainer)" in script for script in (SCRIPTS[0], SCRIPTS[2]))

    from transformers import AutoModelForImageClassification

    import rankwise.models  # noqa: F401  (AutoModel reads ToST)

    model = AutoModelForImageClassification.from_pretrained(tmp_path / "tost-images" / "model")
    assert model.config.id2label == {0: "dark", 1: "light"}
    with torch.no_grad():
        assert model(torch.rand(2, 3, 8, 8)).logits.shape == (2, 2)


def test_both_models_have_a_script() -> None:
    assert ["ToSTForCausalLM" in SCRIPTS[0], "ToSTForImageClassification" in SCRIPTS[2]] == [True, True]
