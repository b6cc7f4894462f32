"""Experiments on training: one file each, entered here. `python -m recipes.run NAME` runs them."""

from recipes.experiment import Experiment
from recipes.trained.depth import DEPTH
from recipes.trained.language import LANGUAGE, WIKITEXT
from recipes.trained.language_parts import LANGUAGE_PARTS, RECALL_PARTS
from recipes.trained.long_range import LONG_RANGE
from recipes.trained.saturation import SATURATION_IMAGES, SATURATION_TEXT
from recipes.trained.skips import SKIPS_IMAGE, SKIPS_RECALL
from recipes.trained.vision import VISION

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
