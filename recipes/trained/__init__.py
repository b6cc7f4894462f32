"""Experiments on training: one file each, entered here. `python -m recipes.run NAME` runs them."""

from recipes.experiment import Experiment
from recipes.trained.language import LANGUAGE

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (LANGUAGE,)}
