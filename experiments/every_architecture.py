"""Claim: capture sees the mixers of every architecture of transformers, or says which not, and why.

Builds every model type that the installed transformers has (no download), tiny and with random float32
weights, each in a process of its own with a time limit, and notes

- whether it ran, and on which inputs; where it did not, the first error;
- outputs with and without capture, bit by bit;
- how many of the mixers that were called were captured, and the reasons in `uncaptured` for the others;
- modules whose class looks like a mixer and of which capture says nothing at all;
- how many of the eager model's ``output_attentions`` are among the captured matrices;
- λ-skips: none of them changes an output at λ = 1, and all come out again.

    python -m experiments run every_architecture

Expected: outputs are bit-identical wherever a model runs, and every mixer is captured or listed with its
reason.
"""

import json
import multiprocessing
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from experiments.architectures_page import tables
from experiments.results import RESULTS
from experiments.study import Study
from rankwise._internals.files import write_file

LIMIT, MEMORY = 60.0, 8 << 30
PROGRESS = RESULTS / "every_architecture.part"
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


def measure(data: Path) -> dict[str, Any]:
    """Check every model type, two at a time; an interrupted run resumes."""
    every = model_types()
    entries: dict[str, Entry] = json.loads(PROGRESS.read_text(encoding="utf-8")) if PROGRESS.exists() else {}
    for name, entry in run_all([name for name in every if name not in entries], 2, LIMIT):
        entries[name] = entry
        print(f"{len(entries)}/{len(every)} {name}: {entry.get('why') or 'ran'}", flush=True)
        write_file(PROGRESS, json.dumps(entries), "progress")
    PROGRESS.unlink()
    return {"model_types": len(every), "entries": dict(sorted(entries.items()))}


STUDY = Study("every_architecture", measure, "architectures", tables)
