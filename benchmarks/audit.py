"""What an audit costs beside the forward pass it watches: the split, in one run.

    python benchmarks/audit.py
    python benchmarks/audit.py --model sentence-transformers/all-MiniLM-L6-v2 --tokens 128

Four things take turns: the plain forward pass; the pass with `capture` and nothing done with what it sees;
the measures alone, on operators and states kept from one pass; the whole audit. The audit should cost no more
than three forward passes plus the measures. That capture leaves outputs bit-identical is checked in the run.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from harness import machine, timed

import rankwise as rw
from rankwise.assets import demo_model, demo_text
from rankwise.audit.heads import HeadTable
from rankwise.audit.layers import LayerTable
from rankwise.measures import DELTA
from rankwise.subjects import inputs_for, load_subject


def main() -> None:
    args = arguments()
    subject = load_subject(args.model or str(demo_model()), device=args.device)
    text = args.text or demo_text()
    batches = list(
        inputs_for(
            subject, text=text, tokens=args.tokens, sequences=args.sequences, batch_size=args.batch_size
        ).batches
    )
    batches = [{name: one.to(args.device) for name, one in batch.items()} for batch in batches]
    model = subject.model
    with rw.capture(model) as trace, torch.no_grad():
        seen = [model(**batch)[0] for batch in batches]

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(**batch)[0] for batch in batches]

    def captured() -> list[torch.Tensor]:
        watch = rw.capture(model, on_mixer=lambda site: None, on_state=lambda state: None)
        with watch, torch.no_grad():
            return [model(**batch)[0] for batch in batches]

    def measures() -> None:
        heads, layers = HeadTable(DELTA), LayerTable()
        for site in trace.mixers:
            heads.add(site)
        for state in trace.states:
            layers.add(state)
        heads.commit()
        layers.commit()
        heads.records()

    runs: dict[str, Callable[[], object]] = {
        "forward": forward,
        "capture": captured,
        "measures": measures,
        "audit": lambda: rw.audit(model, batches),
    }
    for one, other in zip(forward(), seen, strict=True):
        assert torch.equal(one, other), "capture changed an output"
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.repeats + 1):
        for name, run in runs.items():
            took, _ = timed(run, torch.device(args.device))
            if turn:  # the first turn loads libraries and fills the cache of nulls
                seconds[name].append(took)
    print_split(seconds, args)


def print_split(seconds: dict[str, list[float]], args: argparse.Namespace) -> None:
    best = {name: min(times) for name, times in seconds.items()}
    unit = best["forward"]
    over = [
        (a - m) / f for a, m, f in zip(*(seconds[k] for k in ("audit", "measures", "forward")), strict=True)
    ]
    result = {
        "machine": machine(torch.device(args.device)),
        "model": args.model or "the bundled demo",
        "tokens": args.tokens,
        "sequences": args.sequences,
        "in_forward_passes": {name: time / unit for name, time in best.items()},
        "audit_without_measures": statistics.median(over),
    }
    for name, ratio in result["in_forward_passes"].items():
        print(f"  {name:10}{ratio:9.2f} × the forward pass")
    print(
        f"  audit less measures, median of {len(over)}: {statistics.median(over):.2f} forward passes (bar: 3)"
    )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or folder; the bundled demo by default")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
