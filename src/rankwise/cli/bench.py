"""`rankwise bench`."""

from pathlib import Path
from typing import Annotated

import typer

HELP = """Measure an operation here, against what you would use instead and against the limit of the machine.

One run, in turns, with outputs and gradients checked against float64: status 1 if one
is wrong. "tssa" takes about 20 minutes on two cores, --quick one.

[bold]Examples[/bold]

  rankwise bench tssa --quick

  rankwise bench tssa --out tssa.json --plot tssa.html

  rankwise bench tssa --device cuda --dtype bfloat16 --out h200.json
"""
KNOWN = ("tssa",)


def command(
    operation: Annotated[str, typer.Argument(help="What to measure: tssa.")],
    out: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of times by length, as HTML.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short texts, few rounds, no memory.")] = False,
    tokens: Annotated[str | None, typer.Option(help="Lengths, rising, such as 256,8192.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; times are medians.")] = 9,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
) -> None:
    """Run a benchmark; see `HELP`."""
    import json

    import torch

    from rankwise.errors import InputError, did_you_mean
    from rankwise.files import write_whole
    from rankwise.ops.tssa.bench import run, show

    if operation not in KNOWN:
        fix = did_you_mean(operation, KNOWN)
        raise InputError(f"bench {operation}", wanted="tssa", got=operation, fix=fix)
    kind = getattr(torch, dtype, None)
    if kind not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        known = did_you_mean(dtype, ("float32", "bfloat16", "float16", "float64"))
        raise InputError(f"--dtype {dtype}", wanted="a floating-point type", got=dtype, fix=known)
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        fix = "Run on a machine with a CUDA GPU, or leave --device out."
        raise InputError(f"--device {device}", wanted="a device that is there", got="none", fix=fix)
    lengths: tuple[int, ...] = run.QUICK if quick else run.TOKENS
    if tokens is not None:
        parts = tokens.split(",")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            fix = "Such as --tokens 256,8192."
            raise InputError(f"--tokens {tokens}", wanted="whole numbers above 0", got=tokens, fix=fix)
        lengths = tuple(sorted({int(part) for part in parts}))
    report = {"machine": run.machine(device, kind), "shape": "B=1 H=12 K=64", "repeats": repeats}
    print(json.dumps(report["machine"]))
    rows = []
    for row in run.sizes(lengths, device, kind, 3 if quick else repeats, memory=not quick):
        print(show.line(row), flush=True)
        rows.append(row)
    positions = (1024, 4096) if quick else run.POSITIONS
    decoding = run.decoding(device, kind, 3 if quick else repeats, positions)
    for step in decoding:
        print(f"decoding {step}")
    report |= {"rows": rows, "decoding": decoding, "crossovers": show.crossovers(rows)}
    for name, length in show.crossovers(rows).items():
        print(f"{name}: faster than softmax attention from T={'never' if length is None else round(length)}")
    if out is not None:
        print(f"numbers: {write_whole(out, json.dumps(report, indent=1), 'benchmark')}")
    if plot is not None:
        print(f"picture: {write_whole(plot, show.picture(report), 'picture')}")
    wrong = [f"{show.title(row)}, T={row['tokens']}" for row in rows if not row["right"]]
    if wrong:
        print(f"WRONG, more than twice as far from float64 as the plain formulas: {'; '.join(wrong)}")
        raise typer.Exit(1)
