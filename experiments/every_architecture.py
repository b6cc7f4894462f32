"""Claim: capture sees the mixers of every architecture of transformers, or says which not, and why.

Builds every model type that the installed transformers has (no download), tiny and with random float32
weights, each in a process of its own with a time limit, and notes

- whether it ran, and on which inputs; where it did not, the first error;
- outputs with and without capture, bit by bit;
- how many of the mixers that were called were captured, and the reasons in `uncaptured` for the others;
- modules whose class looks like a mixer and of which capture says nothing at all;
- how many of the eager model's ``output_attentions`` are among the captured matrices;
- λ-skips: none of them changes an output at λ = 1, and all come out again.

    python -m experiments.every_architecture --jobs 2

writes experiments/results/every_architecture.json, one entry a model type, and docs/architectures.md from it.
What is in the file already is not run again: an interrupted run goes on where it stopped. Expected: outputs
are bit-identical wherever a model runs, and every mixer is captured or listed with its reason.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from experiments.architectures_page import page

RESULTS = Path(__file__).with_name("results") / "every_architecture.json"
PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
LIMIT, MEMORY = 60.0, 8 << 30
PRELOADED = [
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "rankwise.capture",
    "rankwise.skips",
    "experiments.architecture_checks",
]
Entry = dict[str, Any]


def model_types() -> list[str]:
    """Every model type that `AutoModel` of the installed transformers builds."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def run_one(model_type: str, limit: float, answers: Connection) -> None:
    """Check one model type in this process, within its memory, and send what was found."""
    import warnings

    import torch
    import transformers

    from experiments.architecture_checks import check_architecture

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
    answers.send(check_architecture(model_type))


def run_all(types: list[str], jobs: int, limit: float) -> Iterator[tuple[str, Entry]]:
    """Check model types, each in a process of its own, a few beside each other.

    Args:
        types: their names.
        jobs: processes at a time.
        limit: seconds of processor time for each; of the clock, thirty times as many.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    waiting, running = list(reversed(types)), dict[str, tuple[ForkServerProcess, Connection, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            answers, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_one, args=(name, limit, theirs), daemon=True)
            process.start()
            theirs.close()
            running[name] = process, answers, time.monotonic()
        multiprocessing.connection.wait([answers for _, answers, _ in running.values()], timeout=1)
        for name, (process, answers, start) in list(running.items()):
            entry = _answer(process, answers, time.monotonic() - start > 30 * limit, limit)
            if entry is not None:
                del running[name]
                yield name, entry


def _answer(process: ForkServerProcess, answers: Connection, late: bool, limit: float) -> Entry | None:
    """What a process found; None while it still runs."""
    entry: Entry | None = None
    if answers.poll():
        try:
            entry = answers.recv()
        except EOFError:
            process.join()
            ran_out = process.exitcode in (-9, -24)  # killed, or out of its processor time
            why = f"not done in {limit:.0f} s" if ran_out else f"its process ended with {process.exitcode}"
            entry = {"ran": False, "why": why}
    elif late:
        process.kill()
        entry = {"ran": False, "why": f"not done in {limit:.0f} s"}
    if entry is not None:
        process.join()
        answers.close()
    return entry


def versions() -> dict[str, str]:
    """What the results depend on."""
    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} CPU",
    }


def save(entries: dict[str, Entry], types: int, path: Path) -> None:
    """Write all entries, a line each, in one piece."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
    head = f'"versions": {json.dumps(versions())},\n"model_types": {types}'
    text = f'{{\n{head},\n"entries": {{\n{lines}\n}}\n}}\n'
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """Check what is not in the results yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="check these, also those checked before")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each (default: %(default)g)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    entries: dict[str, Entry] = {}
    if given.results.exists():
        kept = json.loads(given.results.read_text(encoding="utf-8"))
        entries = kept["entries"] if kept["versions"] == versions() else {}
    every = model_types()
    types = given.types or [name for name in every if name not in entries]
    for done, (name, entry) in enumerate(run_all(types, given.jobs, given.limit), start=1):
        entries[name] = entry
        print(f"{done}/{len(types)} {name}: {entry.get('why') or 'ran'}", flush=True)
        save(entries, len(every), given.results)
    given.page.write_text(page(entries, versions(), len(every)), encoding="utf-8")
    print(f"wrote {given.page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
