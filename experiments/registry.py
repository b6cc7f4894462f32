"""List of the experiments on training and of the studies; each is one file, and is entered here."""

from importlib import import_module

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

MODULES = (
    "coverage.architectures",
    "coverage.families",
    "tost.memberships",
    "tost.replacement",
    "rank.compress_cache",
    "rank.compress_demo",
    "rank.compress_minilm",
    "rank.importance",
    "rank.initial_ranks",
    "rank.rank_barrier",
    "rank.rank_saturation",
    "skips.bound_search",
    "skips.collapse_depth",
    "skips.collapse_trained",
    "skips.monitor_collapse",
    "skips.repair",
    "skips.skip_families",
    "tost.shortcuts",
    "tost.rate_descent",
)
"""Modules of the studies."""
STUDIES: dict[str, Study] = {
    study.name: study for study in (*(import_module(f"experiments.{name}").STUDY for name in MODULES), *DEMOS)
}
