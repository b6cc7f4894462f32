"""The script of docs/how-to/train.md trains a ToST, and resumes when it is run again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train.md"


def test_the_script_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("datasets")
    found = re.search(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    script = found[1]
    assert len(script.splitlines()) <= 45
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question. " * 200)
    script = script.replace("_steps=200", "_steps=2").replace("every=100", "every=2")
    outputs = []
    for steps in (3, 5):
        small = script.replace("128, 600", f"16, {steps}")
        assert small != script
        (tmp_path / "train.py").write_text(small)
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert (tmp_path / "tost" / "checkpoint-5").is_dir()
    audits = sorted(path.name for path in (tmp_path / "tost" / "rank").glob("step-*"))
    assert audits == ["step-0", "step-2", "step-4"]
    assert "'epoch'" in outputs[1]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    import rankwise.models  # noqa: F401  (AutoModel reads ToST)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tost" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tost" / "model")
    ids = tokenizer("to be", add_special_tokens=False).input_ids
    with torch.no_grad():
        assert model(torch.tensor([ids])).logits.isfinite().all()
