"""Makers of runs with the values that tests read."""

from pathlib import Path
from typing import Any

from experiments.experiment import Experiment
from experiments.registry import EXPERIMENTS
from experiments.results import Run, append_run, settings_of

LANGUAGE = EXPERIMENTS["language"]


def made(
    settings: dict[str, Any] | None = None, hardware: dict[str, Any] | None = None, **values: Any
) -> Run:
    """Return a run with the given settings, hardware and values."""
    provenance = {"hardware": hardware or {"processor": "a processor", "threads": 1}}
    return {
        "row": "",
        "seed": values.pop("seed", 0),
        "settings": settings or {},
        "values": values,
        "provenance": provenance
        | {"command": "python -m experiments run", "torch": "2", "transformers": "5"},
    }


def kept(
    folder: Path, label: str, seed: int, loss: float, experiment: Experiment = LANGUAGE, **changed: Any
) -> Run:
    """Keep a run of a row, with some settings changed."""
    configuration = settings_of(experiment.rows[label])
    run = made(
        configuration | changed,
        seed=seed,
        scores={"loss": loss, "accuracy": 0.5},
        parameters=1234,
        tokens_per_second=500.0,
        seconds=120.0,
        cpu_seconds=60.0,
        peak_memory=2**30,
        chance=None,
        data={"source": "a text", "train": 1000, "test": 20, "sha256": "abc"},
    )
    run["row"] = label
    append_run(experiment.path(folder), run)
    return run
