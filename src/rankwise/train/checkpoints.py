"""Checkpoints that are whole, of this very recipe, and none else."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from rankwise._internals.files import parse_json, write_file
from rankwise.errors import TrainingError
from rankwise.train.overrides import fields
from rankwise.train.settings import Recipe

logger = logging.getLogger("rankwise.train")

MARK = "recipe.json"
"""Written into a checkpoint last: where it is missing, the process ended before the checkpoint was whole."""
BEGAN = ".{}.rankwise"
"""Beside a checkpoint from before it is made until it is gone: where it is missing, another program made the
folder. It is not inside, for a folder is removed file by file, and the process may be killed at any."""
KEPT = 2
"""Checkpoints that stay: the newest, and the best or else the one before."""
STATE = "trainer_state.json"
"""Where the Trainer writes what it goes on from."""
MAY_DIFFER = {
    "task.path",
    "device",
    "claim",
    "monitor",
    "monitor_every",
    "monitor_tokens",
    "monitor_stop_on",
    "early",
    "early_data",
    "when_early_fails",
}
"""Fields that a run may be resumed with other values of: none changes a weight."""


def identity(recipe: Recipe, provenance: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint must agree on to go on from it, as JSON holds it.

    Args:
        recipe: the configuration.
        provenance: of the data.
    """
    decisive = {name: value for name, value in fields(recipe).items() if name not in MAY_DIFFER}
    content: dict[str, Any] = json.loads(json.dumps(decisive | {"data": provenance}, default=dict))
    return content


def begin(out: Path, step: int) -> None:
    """Say, before there is anything of it, that a checkpoint is ours.

    Args:
        out: folder of the run.
        step: of the checkpoint.
    """
    _began(out / f"checkpoint-{step}").touch()


def _began(checkpoint: Path) -> Path:
    return checkpoint.with_name(BEGAN.format(checkpoint.name))


def mark(checkpoint: Path, content: dict[str, Any]) -> None:
    """Say that a checkpoint is whole, or whose audits a folder holds.

    Args:
        checkpoint: the folder.
        content: `identity` of the run.
    """
    write_file(checkpoint / MARK, json.dumps(content, indent=1) + "\n", "checkpoint")


def checkpoints(out: Path) -> list[Path]:
    """Folders of checkpoints, whole or not, by step.

    Args:
        out: folder of the run.
    """
    found = [one for one in out.glob("checkpoint-*") if one.name.partition("-")[2].isdecimal()]
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def whole_checkpoints(out: Path) -> list[Path]:
    """Those that can be resumed from, by step.

    Args:
        out: folder of the run.
    """
    return [one for one in checkpoints(out) if (one / MARK).is_file()]


def is_ours(checkpoint: Path) -> bool:
    """Whether `rankwise train` made a folder.

    Args:
        checkpoint: the folder.
    """
    plain = checkpoint.is_dir() and not checkpoint.is_symlink()
    return plain and (_began(checkpoint).is_file() or (checkpoint / MARK).is_file())


def remove_old(out: Path, step: int, best: str | None) -> None:
    """Remove checkpoints of ours but the newest, the best, and as many before as make `KEPT`.

    Each is no longer whole before its first file goes. The Trainer's own rotation comes before a new
    checkpoint is marked, and may remove the last that is.

    Args:
        out: folder of the run.
        step: of the newest checkpoint, which is whole; what has a larger number is not of this run.
        best: path of the best.
    """
    newest = f"checkpoint-{step}"
    ours = [one for one in checkpoints(out) if is_ours(one) and _step(one) <= step]
    whole = [one for one in ours if (one / MARK).is_file()]
    needed = {newest, newest if best is None else Path(best).name}
    others = [one for one in whole if one.name not in needed]
    left = [one for one in ours if one not in whole]  # those whose removal failed before
    for one in others[: max(0, len(whole) - KEPT)] + left:
        _began(one).touch()
        (one / MARK).unlink(missing_ok=True)
        remove(one)
    forget_removed(out)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, or as much of it as goes, with a warning: a training does not end for that.

    Args:
        checkpoint: the folder.
    """
    try:
        shutil.rmtree(checkpoint)
    except OSError as error:
        logger.warning("%s could not be removed: %s", checkpoint, error.strerror or error)


def forget_removed(out: Path) -> None:
    """Forget checkpoints that are gone: another program may make folders of the same names.

    Args:
        out: folder of the run.
    """
    there = {_began(one).name for one in checkpoints(out)}
    for left in out.glob(BEGAN.format("checkpoint-*")):
        if left.name not in there and left.is_file():
            left.unlink(missing_ok=True)


def remove_broken(out: Path) -> None:
    """Remove checkpoints of ours that were not whole when their process ended; others stay.

    Args:
        out: folder of the run.
    """
    for one in checkpoints(out):
        if is_ours(one) and not (one / MARK).is_file():
            remove(one)
    forget_removed(out)


def refuse_foreign(out: Path) -> None:
    """See that no folder is there that the training would take for a checkpoint and remove.

    Args:
        out: folder of the run.

    Raises:
        TrainingError: naming what another program wrote.
    """
    foreign = [one for one in checkpoints(out) if not is_ours(one)]
    if foreign:
        raise TrainingError(
            f"--out {out}",
            expected="a folder with checkpoints of `rankwise train` alone",
            got=f"{', '.join(one.name for one in foreign[:4])} without {MARK}, which it did not write",
            fix="Choose another --out, or move them away.",
        )


def last_whole(out: Path, content: dict[str, Any]) -> Path | None:
    """The newest checkpoint that is whole.

    Args:
        out: folder of the run.
        content: `identity` of the run that is to go on from it.

    Returns:
        Its folder; None where there is none.

    Raises:
        TrainingError: if it is of another recipe, configuration or text, naming what differs.
    """
    whole = whole_checkpoints(out)
    for one in reversed(whole):
        refuse_other(one, content)
    return whole[-1] if whole else None


def find_best_beside(checkpoint: Path) -> None:
    """Name the best checkpoint by where it is now: its path may be relative, or the folder have been moved.

    Args:
        checkpoint: that the run is to go on from.
    """
    path = checkpoint / STATE
    state = json.loads(path.read_text(encoding="utf-8"))
    best = state.get("best_model_checkpoint")
    here = None if best is None else checkpoint.parent / Path(best).name
    if here is not None and here.is_dir() and str(here) != best:
        write_file(path, json.dumps(state | {"best_model_checkpoint": str(here)}, indent=2), "state")


def refuse_other(folder: Path, content: dict[str, Any], kind: str = "checkpoint") -> None:
    """See that what a folder holds is of this run.

    Args:
        folder: that was marked.
        content: `identity` of the run.
        kind: what an error calls it.

    Raises:
        TrainingError: if it is of another recipe, configuration or text, naming what differs.
    """
    try:
        kept = parse_json((folder / MARK).read_text(encoding="utf-8"))
        if not isinstance(kept, dict):
            raise ValueError(f"no object but {type(kept).__name__}")
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{kind} {folder}",
            expected=f"a {MARK} that can be read",
            got=str(error),
            fix="Remove that folder; the run goes on from what is before it.",
        ) from error
    different = sorted(name for name in {*kept, *content} if kept.get(name) != content.get(name))
    if different:
        first = "; ".join(
            f"{name}: {_short(kept, name)} there, {_short(content, name)} here" for name in different[:4]
        )
        raise TrainingError(
            f"{kind} {folder}",
            expected=f"those of {content['name']} with this configuration",
            got=f"another run's ({first})",
            fix="Give the keys it was started with, or another --out.",
        )


def _short(content: dict[str, Any], name: str) -> str:
    text = json.dumps(content.get(name))
    return text if len(text) < 60 else f"{text[:57]}…"
