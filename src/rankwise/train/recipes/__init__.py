"""The recipes: functions that return a whole configuration. One file each, one line in `RECIPES`."""

from collections.abc import Callable
from typing import Any

from rankwise.errors import InputError, did_you_mean
from rankwise.train.overrides import build
from rankwise.train.recipes.depth import depth
from rankwise.train.recipes.language import language
from rankwise.train.recipes.long_range import long_range
from rankwise.train.recipes.saturation import saturation
from rankwise.train.recipes.skips import skips
from rankwise.train.recipes.vision import vision
from rankwise.train.settings import Recipe

RECIPES: dict[str, Callable[..., Recipe]] = {
    "depth": depth,
    "language": language,
    "long-range": long_range,
    "saturation": saturation,
    "skips": skips,
    "vision": vision,
}
"""By name. An argument of a recipe is an axis of its experiment; all else is a field of what it returns."""


def recipe(name: str, /, **given: Any) -> Recipe:
    """The configuration of a recipe, some of it changed.

    Args:
        name: one of `RECIPES`.
        **given: arguments of the recipe, and fields of the configuration by their last name (``width=64``);
            dotted ones go through ``**{"model.width": 64}``.

    Raises:
        InputError: for an unknown recipe or key, and for a value of the wrong type.

    Examples:
        >>> recipe("language", model="tost", steps=10).steps
        10
    """
    if name not in RECIPES:
        raise InputError(
            f"recipe {name!r}", expected="a recipe", got="an unknown name", fix=did_you_mean(name, RECIPES)
        )
    return build(RECIPES[name], given)
