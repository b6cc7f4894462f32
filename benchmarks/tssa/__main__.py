"""TSSA against eager, softmax attention, a linear-attention kernel and the limit of the machine, in one run.

    python -m benchmarks.tssa --quick
    python -m benchmarks.tssa --tokens 8192 --repeats 15 --out tssa.json --plot tssa.html
    python -m benchmarks.tssa --device cuda --dtype bfloat16 --out h200.json

Every contender has its turn in every round, so that whatever else the machine does hits all of them; ratios
are of medians, and of the fastest readings, which other work disturbs least. Answers are compared with
float64 in the same run: status 1 if one is wrong. All lengths take some 20 minutes on two cores, --quick one.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from benchmarks.tssa import run, show

from rankwise._internals.files import write_file

DTYPES = ("float32", "bfloat16", "float16", "float64")


def lengths(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, rising."""
    found = tuple(sorted({int(part) for part in text.split(",")}))
    if found[0] < 1:
        raise ValueError
    return found


def options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.tssa", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short texts, few rounds, no memory")
    parser.add_argument("--tokens", type=lengths, help="lengths, such as 256,8192")
    parser.add_argument("--repeats", type=int, default=9, help="rounds; times are medians")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--plot", type=Path, help="write a picture of times by length, as HTML")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    asked = options(given)
    device, dtype, repeats = asked.device, getattr(torch, asked.dtype), 3 if asked.quick else asked.repeats
    report = {"machine": run.machine(device, dtype), "shape": "B=1 H=12 K=64", "repeats": repeats}
    print(json.dumps(report["machine"]))
    tokens = asked.tokens or (run.QUICK if asked.quick else run.TOKENS)
    rows = []
    for row in run.sizes(tokens, device, dtype, repeats, memory=not asked.quick):
        print(show.line(row), flush=True)
        rows.append(row)
    decoding = run.decoding(device, dtype, repeats, (1024, 4096) if asked.quick else run.POSITIONS)
    for step in decoding:
        print(f"decoding {step}")
    report |= {"rows": rows, "decoding": decoding, "crossovers": show.crossovers(rows)}
    for name, length in show.crossovers(rows).items():
        print(f"{name}: faster than softmax attention from T={'never' if length is None else round(length)}")
    if asked.out is not None:
        print(f"numbers: {write_file(asked.out, json.dumps(report, indent=1), 'benchmark')}")
    if asked.plot is not None:
        print(f"picture: {write_file(asked.plot, show.picture(report), 'picture')}")
    wrong = [f"{show.title(row)}, T={row['tokens']}" for row in rows if not row["right"]]
    if wrong:
        print(f"WRONG, more than twice as far from float64 as the plain formulas: {'; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
