"""Which part brings causal ToST near the transformer: short runs on bytes, and on associative recall."""

from typing import Any

import torch

from experiments.experiment import Experiment, Table, below, within
from experiments.results import Run
from experiments.trained.reading import markdown
from rankwise.data.tasks.examples import Examples
from rankwise.data.tasks.language import BYTE_VOCABULARY
from rankwise.data.tasks.task import Provenance, Task
from rankwise.models.mixers import build_mixer
from rankwise.train.models import model_config
from rankwise.train.settings import ModelSettings

PARAMETERS = 214_016
"""Of the transformer of width 64."""
SHORT: dict[str, Any] = {
    "model.width": 64,
    "model.parameters": PARAMETERS,
    "steps": 300,
    "task.tokens": 128,
    "evaluation.every": 300,
    "evaluation.examples": 200,
}
"""A tenth of the cost of the experiment ``language``."""


def parts(model: str = "tost-decayed", **tssa: int) -> dict[str, Any]:
    """A row: a model, and options of its TSSA."""
    return {"model": model, **SHORT, **({"model.options.mixer_options": {"tssa": tssa}} if tssa else {})}


ROWS: dict[str, dict[str, Any]] = {
    "transformer": parts("transformer"),
    "softmax": parts("softmax"),
    "linear": parts("linear"),
    "mamba2": parts("mamba2"),
    "tost": parts("tost"),
    "tost-no-bias": {**parts("tost"), "model.options.position_bias": False},
    "tost-conv": parts("tost", conv_tokens=4),
    "decayed": parts(),
    "decayed-short-lives": {**parts(), "model.options.half_life": [1.0, 2.5, 6.3, 16.0]},
    "decayed-gate": {**parts(), "model.options.gate": True},
    "decayed-conv": parts(conv_tokens=4),
    "decayed-scan16": parts(features=16),
    "decayed-conv-scan1": parts(conv_tokens=4, features=1),
    "decayed-conv-scan4": parts(conv_tokens=4, features=4),
    "decayed-conv-scan16": parts(conv_tokens=4, features=16),
    "decayed-conv-scan32": parts(conv_tokens=4, features=32),
    "hybrid": parts("tost-hybrid"),
    "hybrid-conv": parts("tost-hybrid", conv_tokens=4),
    "hybrid-conv-scan16": parts("tost-hybrid", conv_tokens=4, features=16),
    "decayed-conv-scan16-gate": {
        **parts(conv_tokens=4, features=16),
        "model.options.gate": True,
    },
}


def state_numbers(run: Run) -> int:
    """Numbers that a run's model keeps for a sequence of the length it was trained on."""
    tokens = run["settings"]["task"]["tokens"]
    settings = ModelSettings(**run["settings"]["model"])
    if settings.name == "transformer":
        return 2 * settings.layers * settings.width * tokens
    origin = Provenance("bytes", "none", None, 0, 0, "")
    none = Examples({})
    task = Task("bytes", "language", none, none, tokens, origin, vocab_size=BYTE_VOCABULARY)
    config = model_config(settings, task, tokens)
    with torch.device("meta"):
        return sum(build_mixer(config, layer).state_size(tokens) for layer in range(settings.layers))


def frontier(table: Table) -> str:
    """Loss by the size of the decoding state, the smallest first."""
    kept = sorted((state_numbers(row.runs[0]), row.mean("loss"), label) for label, row in table.items())
    of = table["transformer"].mean("loss") if "transformer" in table else float("nan")
    rows, least = [], float("inf")
    for numbers, loss, label in kept:
        told = "yes" if loss < least else ""
        rows.append((label, f"{4 * numbers:,}", f"{loss:.3f}", f"{loss - of:+.3f}", told))
        least = min(least, loss)
    said = (
        "Loss by decoding state: bytes in float32 for one sequence, over all layers; the transformer's is of "
        "128 tokens and grows with them. On the frontier: no state of at most this size has a lower loss."
    )
    headings = ("", "state, bytes", "loss", "to the transformer", "on the frontier")
    return "\n".join([said, "", *markdown(headings, rows)])


WHY = """\
Why causal ToST trails: its output is −Π w / (1 + m), so whatever the past, each channel of a token's own
w is multiplied by a number from −1 to 0, and its mixing operator is diagonal. The past comes in through
sums alone, those in Π and the mean m, in which, without decay and with uniform memberships, the token
before has weight 1 / t (tests/models/test_mixers.py holds both). No token hands its features to
another, and the next byte depends first on the last few. What moves features at linear cost, each an
option of `rankwise.models.TokenStatisticsAttention` that is off by default: a causal convolution of w
over 4 tokens, each channel by itself (conv), and a scan of F features with memberships as steps
(scanF), M[t, u] = c_t·b_u exp(−a Σ Π_r) Π_u. Its rates a are learned; half-lives of the statistics are
not, since the kernels give them no gradient: short-lives has them from 1 to 16 tokens in place of 4 to
128."""
SETTING = """\
Width 64, 300 steps on 128 bytes, a tenth of the cost of the experiment above, all with the weights of the
transformer within 0.2 %. The transformer is far from the end of its training here. `softmax` is attention
in the frame of the other rows, transformer that of Llama; hybrid has softmax attention in the last of its
four layers."""

LANGUAGE_PARTS = Experiment(
    name="language-parts",
    title="Causal ToST on bytes, part by part",
    source="none: the question is why causal ToST trails, and which part closes it at linear cost",
    recipe="language",
    rows=ROWS,
    expectations=(
        below("decayed-gate", "decayed", by=0.03),
        below("decayed-short-lives", "decayed", by=0.03),
        below("tost", "tost-no-bias", by=0.03),
        within("decayed-conv", "transformer", 0.10),
        within("decayed-scan16", "transformer", 0.10),
        within("decayed-conv-scan16", "transformer", 0.10),
        within("hybrid", "transformer", 0.03),
        within("hybrid-conv-scan16", "transformer", 0.03),
        below("decayed-conv-scan16", "decayed-conv", by=0.03),
        below("decayed-conv-scan16-gate", "decayed-conv-scan16", by=0.03),
        below("decayed-conv-scan16", "linear"),
    ),
    notes=WHY + "\n\n" + SETTING,
    more=frontier,
)


def recall(model: str, **tssa: int) -> dict[str, Any]:
    """A row: a model, and options of its TSSA."""
    options = {"model.options.mixer_options": {"tssa": tssa}} if tssa else {}
    return {"task": "recall", "model.name": model, "monitor": False, **options}


RECALL_PARTS = Experiment(
    name="recall-parts",
    title="Causal ToST on associative recall, part by part",
    source="none: can a layer that only scales tokens find what stood beside a key? The task: Arora "
    "et al., “Zoology”, ICLR 2024",
    recipe="skips",
    rows={
        "softmax": recall("softmax"),
        "tost": recall("tost"),
        "decayed": recall("tost-decayed"),
        "decayed-conv": recall("tost-decayed", conv_tokens=4),
        "decayed-scan16": recall("tost-decayed", features=16),
        "decayed-conv-scan16": recall("tost-decayed", conv_tokens=4, features=16),
    },
    metric="accuracy",
    expectations=(
        below("tost", "decayed-conv-scan16", "accuracy", by=0.1),
        below("decayed", "decayed-conv-scan16", "accuracy", by=0.1),
    ),
    notes="Two layers of width 64, 2 pairs of keys and values in 16 tokens; not of equal "
    "parameters. Half of the answers are right where a model tells the values of a sequence but not "
    "their keys.",
)
