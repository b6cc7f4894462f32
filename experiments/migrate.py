"""Move the 513 files of results/train into one JSON Lines file per experiment; check that nothing is lost.

python -m experiments.migrate
"""

import json
from pathlib import Path
from typing import Any

from experiments.results import RESULTS, Run, audits_to_columns, read_runs
from experiments.trained import EXPERIMENTS

OLD = RESULTS / "train"


def to_run(label: str, seed: int, content: dict[str, Any]) -> Run:
    """Return the line of a file's content."""
    values = {**content, "rank": audits_to_columns(content["rank"])}
    settings, provenance = values.pop("configuration"), values.pop("provenance")
    return {"row": label, "seed": seed, "settings": settings, "values": values, "provenance": provenance}


def to_content(run: Run) -> dict[str, Any]:
    """Rebuild the content of the file from its line."""
    rank: dict[str, dict[str, float]] = {}
    for measure, column in run["values"]["rank"].items():
        for step, values in column["steps"].items():
            named = zip(column["places"], values, strict=True)
            rank.setdefault(step, {}).update({f"rank/{measure}/{place}": value for place, value in named})
    return {
        **run["values"],
        "rank": rank,
        "configuration": run["settings"],
        "provenance": run["provenance"],
    }


def main() -> None:
    """Write the lines, read them again, rebuild every file."""
    left = set(OLD.glob("*.json"))
    found: dict[str, dict[Path, tuple[str, int]]] = {}
    for experiment in EXPERIMENTS.values():
        for label in experiment.rows:
            start = f"{experiment.name}-{label}-seed".replace(" ", "_").replace("/", "_")
            for path in [path for path in left if path.stem.removeprefix(start).isdecimal()]:
                seed = int(path.stem.removeprefix(start))
                found.setdefault(experiment.name, {})[path] = (label, seed)
                left.remove(path)
    assert not left, left
    before = {path: path.read_text(encoding="utf-8") for files in found.values() for path in files}
    checked = 0
    for name, files in found.items():
        target = RESULTS / f"{name}.jsonl"
        runs = [to_run(*where, json.loads(before[path])) for path, where in files.items()]
        for run in runs:
            assert run["seed"] == run["provenance"]["seed"] == run["settings"]["seed"]
        target.unlink(missing_ok=True)
        from experiments.results import _lines

        target.write_text(_lines(runs), encoding="utf-8")
        kept = {(run["row"], run["seed"]): run for run in read_runs(target)}
        assert len(kept) == len(files)
        for path, where in files.items():
            rebuilt, original = to_content(kept[where]), json.loads(before[path])
            assert json.dumps(rebuilt, sort_keys=True) == json.dumps(original, sort_keys=True), path
            assert rebuilt == original, path
            checked += 1
        print(f"{target.name}: {len(kept)} runs, {target.stat().st_size:,} bytes")
    print(f"{checked} of {len(before)} files rebuilt from their lines and equal")
    for path in before:
        path.unlink()


if __name__ == "__main__":
    main()
