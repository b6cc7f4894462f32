"""List of the experiments on training and of the studies; each is one file, and is entered here."""

from experiments import (
    baselines,
    collapse_depth,
    collapse_trained,
    compress_cache,
    compress_demo,
    compress_minilm,
    every_architecture,
    importance,
    listops_baselines,
    memberships,
    monitor_collapse,
    rate_descent,
    replacement,
    skip_bound_search,
)
from experiments.experiment import Experiment
from experiments.rank import rank_barrier, rank_saturation
from experiments.rank.head_width import SATURATION_IMAGES, SATURATION_TEXT
from experiments.skips.depth import DEPTH
from experiments.skips.lambda_by_mixer import SKIPS_IMAGE, SKIPS_RECALL
from experiments.study import Study
from experiments.tost.language import LANGUAGE, WIKITEXT
from experiments.tost.language_parts import LANGUAGE_PARTS, RECALL_PARTS
from experiments.tost.long_range import LONG_RANGE
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

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        baselines,
        collapse_depth,
        collapse_trained,
        compress_cache,
        compress_demo,
        compress_minilm,
        every_architecture,
        importance,
        listops_baselines,
        memberships,
        monitor_collapse,
        rank_barrier,
        rank_saturation,
        rate_descent,
        replacement,
        skip_bound_search,
    )
}
