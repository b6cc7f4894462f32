"""Train recipes: complete, typed configurations, each for one claim, run by Hugging Face's Trainer."""

from rankwise.train.recipes import RECIPES, recipe
from rankwise.train.run import train
from rankwise.train.settings import Recipe

__all__ = ["RECIPES", "Recipe", "recipe", "train"]
