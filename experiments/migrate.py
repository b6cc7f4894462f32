"""Write the settings of kept runs as `TrainingConfig`, and check that each is that of its row.

python -m experiments.migrate
"""

import json
from pathlib import Path
from typing import Any

from experiments.registry import EXPERIMENTS
from experiments.results import settings_of
from experiments.training.config import TrainingConfig

TEXTS = {"input.txt": "tiny_shakespeare/input.txt", "wikitext2.txt": "wikitext2/valid.txt"}
MEASURES = {"heads_sink_mass": "heads_first_token_mass", "states_relative_spread": "states_relative_collapse"}
CONSTANT = {
    "size": "small",
    "device": "auto",
    "dtype": "float32",
    "monitor_tokens": 128,
    "monitor_stop_on": [],
    "when_early_fails": "warn",
    "model.feed_forward": None,
    "optimiser.name": "adamw",
    "optimiser.schedule": "cosine",
}
DROPPED = {"name", "claim", "variant", "early", "early_data", "task.path", "seed"}


def convert(old: dict[str, Any]) -> TrainingConfig:
    """Return the configuration of a run; what is left over is constant or decides nothing."""
    rest = {name: value for name, value in old.items() if not isinstance(value, dict) or name == "variant"}
    for part in ("model", "task", "optimiser", "evaluation"):
        rest |= {f"{part}.{name}": value for name, value in old[part].items()}
    path = Path(rest["task.path"] or "").name
    made = TrainingConfig(
        model=rest.pop("model.name"),
        width=rest.pop("model.width"),
        layers=rest.pop("model.layers"),
        heads=rest.pop("model.heads"),
        parameters=rest.pop("model.parameters"),
        model_options=rest.pop("model.options"),
        task=rest.pop("task.name"),
        tokens=rest.pop("task.tokens"),
        task_options=rest.pop("task.options"),
        learning_rate=rest.pop("optimiser.learning_rate"),
        weight_decay=rest.pop("optimiser.weight_decay"),
        betas=tuple(rest.pop("optimiser.betas")),
        warmup=rest.pop("optimiser.warmup"),
        clip=rest.pop("optimiser.clip"),
        steps=rest.pop("steps"),
        batch=rest.pop("batch"),
        log_every=rest.pop("log_every"),
        evaluate_every=rest.pop("evaluation.every"),
        evaluate_on=rest.pop("evaluation.examples"),
        metric=rest.pop("evaluation.metric"),
        monitor_every=rest.pop("monitor_every")
        if rest.pop("monitor")
        else rest.pop("monitor_every") * 0 or None,
        **({"text": TEXTS[path]} if path in TEXTS else {}),
    )
    for name, value in rest.items():
        assert name in DROPPED or CONSTANT[name] == value, (name, value)
    return made


def main() -> None:
    """Rewrite every line; compare what is not renamed."""
    total = 0
    for experiment in EXPERIMENTS.values():
        path = experiment.path()
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            old = json.loads(line)
            new = json.loads(line)
            assert old["settings"]["seed"] == old["seed"]
            made = convert(old["settings"])
            row = experiment.rows[old["row"]]
            assert settings_of(made) == settings_of(row), (experiment.name, old["row"], made, row)
            new["settings"] = settings_of(made)
            new["values"]["rank"] = {MEASURES.get(name, name): c for name, c in old["values"]["rank"].items()}
            names = {new_name: old_name for old_name, new_name in MEASURES.items()}
            back = {names.get(name, name): column for name, column in new["values"]["rank"].items()}
            assert {**new["values"], "rank": back} == old["values"]
            assert new["provenance"] == old["provenance"]
            lines.append(json.dumps(new, ensure_ascii=False, separators=(",", ":")) + "\n")
        path.write_text("".join(lines), encoding="utf-8")
        total += len(lines)
    print(f"{total} runs: settings are those of their rows, all other contents equal")


if __name__ == "__main__":
    main()
