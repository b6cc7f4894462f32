"""What an audit costs next to the loop that a user would write by hand, in processor time and memory.

    python -m benchmarks audit
    python -m benchmarks audit --model demo gpt2 FOLDER --before TREE --out audit.json

By hand: eager attention with `output_attentions`, then float32 `torch.linalg.svdvals` of each matrix, its
numerical, effective and stable rank, and the entropy of its rows. Every run has a new process with one
thread; runs take turns. The goal is 1.35 times the time of the loop, and at most its memory. The ranks of the
audit must be those by hand: fused and eager attention round differently, so one value may cross δ.

`--before` adds the audit by another copy of the project, and the largest relative change of a number.
"demo" is the bundled model, "gpt2" a model of the size of GPT-2 small with random weights.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import in_fresh_process, peak_mib, positive, ratio

REPEATS = 3
Batches = list[dict[str, torch.Tensor]]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the models, the size of their input, and the project before a change."""
    parser.add_argument("--model", nargs="+", default=["demo"], help="demo, gpt2, a name or a folder")
    parser.add_argument("--tokens", type=positive, default=256)
    parser.add_argument("--sequences", type=positive, default=2)
    parser.add_argument("--dtype", default="auto", help="dtype of the model (default: as saved)")
    parser.add_argument("--before", type=Path, metavar="TREE", help="folder of the project before a change")


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per model: the runs, and the distance of the audit from the loop and from the old audit."""
    tokens = 32 if given.quick else given.tokens
    runs: dict[str, dict[str, Any]] = {"by hand": {"run": "by hand"}, "audit": {"run": "audit"}}
    if given.before is not None:
        runs["audit before"] = {"run": "audit", "path": [given.before / "src"]}
    for model in given.model:
        job = {"model": model, "tokens": tokens, "sequences": given.sequences, "dtype": given.dtype}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        for _ in range(given.repeats):
            for name, run in runs.items():
                found[name].append(in_fresh_process("audit", **run, **job))
        seconds = {name: [one["seconds"] for one in results] for name, results in found.items()}
        by_hand, audit = found["by hand"][0]["ranks"], found["audit"][0]
        off = max(abs(a - b) for a, b in zip(by_hand, audit["ranks"], strict=True))
        row = job | {
            "seconds": {name: statistics.median(times) for name, times in seconds.items()},
            "times_by_hand": {name: ratio(times, seconds["by hand"]) for name, times in seconds.items()},
            "peak_mib": {name: results[0]["mib"] for name, results in found.items()},
            "largest_difference_of_ranks": off,
            "right": off <= 1,
        }
        if given.before is not None:
            from benchmarks.same_numbers import differences

            changes = differences(found["audit before"][0]["numbers"], audit["numbers"], {}).largest
            row["change_of_spectra"] = changes.pop("heads.spectrum", (0.0, ""))[0]
            row["largest_change"] = max((by, name) for name, (by, _) in changes.items())
        yield row


def peak(run: str, model: str, tokens: int, sequences: int, dtype: str) -> dict[str, Any]:
    """Return processor seconds, MiB and numbers of one run, after one on a few tokens."""
    torch.set_num_threads(1)
    subject, batches = load(model, tokens, sequences, dtype)
    if run == "by hand":
        subject.set_attn_implementation("eager")
    work = {"by hand": by_hand, "audit": audit}[run]
    work(subject, [{name: part[:1, :16] for name, part in batch.items()} for batch in batches[:1]])
    found: dict[str, Any] = {}

    def timed() -> None:
        start = time.process_time()
        found.update(work(subject, batches))
        found["seconds"] = time.process_time() - start

    return {"mib": peak_mib(timed, torch.device("cpu"))} | found


def load(model: str, tokens: int, sequences: int, dtype: str) -> tuple[Any, Batches]:
    """Return a model and batches of at most four sequences without padding."""
    from rankwise.cli.load_data import load_data
    from rankwise.cli.load_model import demo_model, demo_text, load_model

    if model == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        ids = torch.randint(1000, (sequences, tokens))
        return GPT2LMHeadModel(GPT2Config(vocab_size=1000)).eval(), [{"input_ids": ids}]
    subject = load_model(str(demo_model()) if model == "demo" else model, dtype=dtype)
    sizes = {"tokens": tokens, "sequences": sequences, "batch_size": min(sequences, 4)}
    batches = [dict(batch) for batch in load_data(subject, text=demo_text(), **sizes).batches]
    if any((batch.get("attention_mask", torch.ones(1)) == 0).any() for batch in batches):
        raise SystemExit("expected no padding, which svdvals would count. Use fewer tokens or sequences")
    return subject.model, batches


def audit(model: Any, batches: Batches) -> dict[str, Any]:
    """Return numerical ranks by head, and the record of the audit."""
    import rankwise as rw

    done = rw.audit(model, batches)
    return {
        "ranks": [head.numerical_rank for head in done.heads],
        "numbers": json.loads(done.model_dump_json()),
    }


@torch.no_grad()
def by_hand(model: Any, batches: Batches) -> dict[str, Any]:
    """Return numerical ranks by head, as a user would compute them with the other ranks and the entropy."""
    total = torch.zeros(())
    for batch in batches:
        maps = model(**batch, output_attentions=True).attentions
        ranks = torch.zeros(len(maps), *maps[0].shape[:2])
        for layer, matrices in enumerate(maps):
            for sequence in range(matrices.shape[0]):
                for head in range(matrices.shape[1]):
                    matrix = matrices[sequence, head].float()
                    sigma = torch.linalg.svdvals(matrix)
                    ranks[layer, sequence, head] = (sigma >= 0.01).sum()
                    torch.special.entr(sigma / sigma.sum()).sum().exp()  # effective rank
                    (sigma / sigma[0]).square().sum()  # stable rank
                    torch.special.entr(matrix).sum(-1).mean()  # entropy of rows
        total = total + ranks.sum(1)
    return {"ranks": (total / sum(batch["input_ids"].shape[0] for batch in batches)).flatten().tolist()}


def line(row: dict[str, Any]) -> str:
    """Return a line per run, and how far the numbers are apart."""
    lines = [f"{row['model']}, {row['sequences']} × {row['tokens']} tokens"]
    for name, seconds in row["seconds"].items():
        times, memory = row["times_by_hand"][name].median, row["peak_mib"][name]
        lines.append(f"  {name:14}{seconds:9.2f} s{times:8.2f} × by hand{memory or 0:8.0f} MiB")
    lines.append(f"  ranks differ from those by hand by at most {row['largest_difference_of_ranks']:g}")
    if "largest_change" in row:
        lines.append("  largest relative change: {:.1e} ({})".format(*row["largest_change"]))
        lines.append(f"  of singular values, also far below δ: {row['change_of_spectra']:.1e}")
    return "\n".join(lines)
