"""Run a benchmark: what Rankwise costs next to what a user would take instead, and to a limit, in one run.

    python -m benchmarks audit --quick
    python -m benchmarks tssa --tokens 8192 --repeats 15 --out tssa.json
    python -m benchmarks device --help

Runs take turns, in rounds, so that other work on the machine hits all of them; ratios are medians over
rounds. Answers are checked in the same run: the exit status is 1 if one is wrong. `--out` writes JSON with
the fields machine, command, settings and rows. `python -m benchmarks.same_numbers` is a command of its own.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.harness import machine, positive

from rankwise._internals.files import write_file
from rankwise.cli.load_model import check_device
from rankwise.errors import InputError

NAMES = ("audit", "device", "estimate", "language", "monitor_skip", "offload", "state_space", "tssa")
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Environment in which glibc keeps freed memory. By default it returns large tensors to the system and
fetches them again page by page, which takes up to ten times as long as TSSA and hits whichever run comes
next."""


class Benchmark(Protocol):
    """A module of this folder; its docstring is the text of `--help`."""

    REPEATS: int
    """Rounds by default."""

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this benchmark."""

    def measure(self, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """Yield rows as they are measured; `right` is false in a row with a wrong answer."""

    def line(self, row: dict[str, Any]) -> str:
        """Return a row as text."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark of the command line; return the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    choose = argparse.ArgumentParser("benchmarks", description=__doc__, formatter_class=form, add_help=False)
    choose.add_argument("name", choices=NAMES)
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help"):
        choose.print_help()
        return 0
    name = choose.parse_args(words[:1]).name
    benchmark = cast(Benchmark, import_module(f"benchmarks.{name}"))
    parser = argparse.ArgumentParser(
        f"benchmarks {name}", description=benchmark.__doc__, formatter_class=form
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--repeats", type=positive, default=benchmark.REPEATS, help="rounds")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    benchmark.options(parser)
    given = parser.parse_args(words[1:])
    try:
        device = check_device(given.device)
    except InputError as error:
        parser.error(str(error))
    settings = {key: value for key, value in vars(given).items() if key != "out"}
    report: dict[str, Any] = {
        "machine": machine(device),
        "command": f"python -m benchmarks {shlex.join(words)}",
        "settings": settings | {"freed_memory_is_kept": os.environ.items() >= KEPT.items()},
        "rows": [],
    }
    print(json.dumps(report["machine"]))
    for row in benchmark.measure(given):
        report["rows"].append(row)
        print(benchmark.line(row), flush=True)
        if given.out is not None:
            write_file(given.out, json.dumps(report, indent=1, default=str) + "\n", "benchmark")
    wrong = [benchmark.line(row) for row in report["rows"] if not row.get("right", True)]
    if wrong:
        print("\n".join(["WRONG:", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.platform == "linux" and sys.argv[1:2] == ["tssa"] and not os.environ.items() >= KEPT.items():
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], os.environ | KEPT)
    sys.exit(main())
