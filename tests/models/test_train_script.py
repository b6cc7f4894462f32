"""The scripts of docs/how-to/train.md train a ToST, resume from the newest whole checkpoint, and generate."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train.md"
SCRIPTS = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run(script: str, folder: Path) -> str:
    """Run a script in a folder and return its output."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(folder / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(script: str, size: str, steps: int, folder: Path) -> None:
    """Run a script for a few steps, with everything that it does every so many steps in every second."""
    pytest.importorskip("accelerate")
    pytest.importorskip("datasets")
    assert len(script.splitlines()) <= 45
    script = re.sub(r"_steps=\d00|every=\d00", lambda found: f"{found[0].split('=')[0]}=2", script)
    small = re.sub(r"(OUT, \w+, STEPS = Path\(.+\)), .+", rf"\1, {size}, {steps}", script)
    assert f"{size}, {steps}\n" in small
    run(small, folder)


def test_the_script_of_a_language_model_trains_resumes_and_generates(tmp_path: Path) -> None:
    """After 3 steps there are traces of killed processes; then it goes on to 5 steps."""
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question. " * 200)
    out = tmp_path / "tost"
    train(SCRIPTS[0], "16", 3, tmp_path)
    path = out / "checkpoint-3" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"].insert(0, {"step": 0, "from": "the first run"})
    path.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    for killed, content in (("checkpoint-4", path.read_text()[:-20]), ("checkpoint-20", None)):
        (out / killed).mkdir()
        if content is not None:
            (out / killed / "trainer_state.json").write_text(content)
    train(SCRIPTS[0], "16", 5, tmp_path)
    resumed = json.loads((out / "checkpoint-5" / "trainer_state.json").read_text())
    assert resumed["log_history"][0] == {"step": 0, "from": "the first run"}
    assert sorted(path.name for path in (out / "rank").glob("step-*")) == ["step-0", "step-2", "step-4"]
    small = SCRIPTS[1].replace("max_new_tokens=120", "max_new_tokens=5")
    assert small != SCRIPTS[1]
    assert run(small, tmp_path).startswith("ROMEO:")


def test_the_script_of_a_classifier_of_images_trains_and_resumes_in_the_same_lines(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for shade, name in ((40, "dark"), (200, "light")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for at in range(20):
            image.new("RGB", (20, 24), (shade + at,) * 3).save(tmp_path / "pictures" / name / f"{at}.png")
    train(SCRIPTS[2], "8", 3, tmp_path)
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
