"""Experiments on training, which are entered here, and studies: each file with a `STUDY`."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from experiments.experiment import Experiment
from experiments.rank.head_width import SATURATION_IMAGES, SATURATION_TEXT
from experiments.skips.depth import DEPTH
from experiments.skips.lambda_by_mixer import SKIPS_IMAGE, SKIPS_RECALL
from experiments.study import Study
from experiments.tost.language import LANGUAGE, WIKITEXT
from experiments.tost.language_parts import LANGUAGE_PARTS, RECALL_PARTS
from experiments.tost.long_range import LONG_RANGE
from experiments.tost.train_demo import STUDIES as DEMOS
from experiments.tost.vision import VISION

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        LANGUAGE, WIKITEXT, LANGUAGE_PARTS, RECALL_PARTS, DEPTH, SKIPS_IMAGE, SKIPS_RECALL, SATURATION_IMAGES,
        SATURATION_TEXT, *LONG_RANGE, VISION,
    )
}  # fmt: skip

FOLDERS = ("coverage", "rank", "skips", "tost")


def _studies() -> Iterator[Study]:
    """Yield the `STUDY` of each module in `FOLDERS` that has one."""
    for folder in FOLDERS:
        for module in iter_modules([str(Path(__file__).with_name(folder))]):
            found = import_module(f"experiments.{folder}.{module.name}")
            if hasattr(found, "STUDY"):
                yield found.STUDY


STUDIES: dict[str, Study] = {study.name: study for study in (*_studies(), *DEMOS)}
