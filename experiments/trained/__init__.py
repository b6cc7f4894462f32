"""Experiments on training: one file each, entered here. `python -m experiments.run NAME` runs them."""

from experiments.experiment import Experiment
from experiments.trained.depth import DEPTH
from experiments.trained.language import LANGUAGE, WIKITEXT
from experiments.trained.language_parts import LANGUAGE_PARTS, RECALL_PARTS
from experiments.trained.long_range import LONG_RANGE
from experiments.trained.saturation import SATURATION_IMAGES, SATURATION_TEXT
from experiments.trained.skips import SKIPS_IMAGE, SKIPS_RECALL
from experiments.trained.vision import VISION

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        LANGUAGE,
        WIKITEXT,
        LANGUAGE_PARTS,
        RECALL_PARTS,
        DEPTH,
        SKIPS_IMAGE,
        SKIPS_RECALL,
        SATURATION_IMAGES,
        SATURATION_TEXT,
        *LONG_RANGE,
        VISION,
    )
}
