"""``key=value`` on the command line: arguments of a recipe, and fields of the configuration it returns."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from rankwise.errors import InputError, did_you_mean
from rankwise.train.early import early_losses
from rankwise.train.settings import Recipe, Settings, no_boolean

RecipeFunction = Callable[..., Recipe]
KEEPS_EARLY = {
    "seed",
    "device",
    "monitor",
    "monitor_every",
    "monitor_tokens",
    "monitor_stop_on",
    "when_early_fails",
    "task.path",
} | {f"evaluation.{name}" for name in ("every", "examples", "metric")}
"""Fields that may change without another loss in the first steps."""
FIXED = ("name", "variant")
"""Fields that say what a configuration is; the recipe writes them."""


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Turn ``key=value`` into a dict; values are JSON where they can be read so, text otherwise.

    Args:
        pairs: what the user wrote.

    Raises:
        InputError: for what has no ``=``, and for a key that comes twice.

    Examples:
        >>> parse_pairs(["steps=100", "model=tost", "monitor=true"])
        {'steps': 100, 'model': 'tost', 'monitor': True}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise InputError(repr(pair), expected="KEY=VALUE", got="no =", fix="For instance: steps=100.")
        if key in found:
            raise InputError(f"`{key}`", expected="one value", got="two", fix="Leave one of them out.")
        _refuse_fixed(key)
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def build(function: RecipeFunction, given: Mapping[str, Any]) -> Recipe:
    """Call a recipe with the arguments it has, then change the fields of what it returns.

    Args:
        function: the recipe.
        given: values by the name of an argument of the recipe, or of a field: ``model.width``, or ``width``
            where only one part has a field of that name.

    Raises:
        InputError: for a name that is neither, and for a value of another type.
    """
    hints = get_type_hints(function)
    arguments = {name: hints[name] for name in inspect.signature(function).parameters}
    own = {key: _typed(key, value, arguments[key]) for key, value in given.items() if key in arguments}
    base = _called(function, own)
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    variant = {key: value for key, value in {**defaults, **own}.items() if key not in ("size", "seed")}
    early, data = early_losses(base.name, base.size, variant)
    base = base.model_copy(
        update={"variant": variant} | ({"early": early, "early_data": data} if early else {})
    )
    changes = {_path(base, key, arguments): value for key, value in given.items() if key not in arguments}
    content = base.model_dump()
    for path, value in changes.items():
        part = content
        *parents, last = path.split(".")
        for parent in parents:
            part = part[parent]
        part[last] = value
    if any(_at(base, path) != value and path not in KEEPS_EARLY for path, value in changes.items()):
        content["early"] = ()
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise _refused(error) from error


def fields(recipe: Recipe) -> dict[str, Any]:
    """Every field of a configuration by its dotted name.

    Args:
        recipe: the configuration.
    """
    found: dict[str, Any] = {}
    for name, value in recipe:
        if isinstance(value, Settings):
            found |= {f"{name}.{inner}": content for inner, content in value}
        else:
            found[name] = value
    return found


def changes(recipe: Recipe, function: RecipeFunction) -> dict[str, Any]:
    """What a recipe must be given to return this configuration: `build` of it gives it back.

    Args:
        recipe: the configuration.
        function: the recipe it comes from.
    """
    arguments = inspect.signature(function).parameters
    own = {"size": recipe.size, **recipe.variant, "seed": recipe.seed}
    given = {key: own[key] for key in arguments if key in own and own[key] != arguments[key].default}
    base = fields(build(function, given))
    rest = {
        name: value
        for name, value in fields(recipe).items()
        if name not in ("variant", "early", "early_data") and value != base[name]
    }
    options = [name for name in rest if name.endswith(".options")]
    for name in options:
        known = base[name]
        rest |= {f"{name}.{key}": value for key, value in rest.pop(name).items() if known.get(key) != value}
    return given | rest


def beside(recipe: Recipe, function: RecipeFunction) -> dict[str, Any]:
    """Of `changes`, those beside the arguments of the recipe: what its ``variant`` does not say.

    Args:
        recipe: the configuration.
        function: the recipe it comes from.
    """
    arguments = inspect.signature(function).parameters
    return {key: value for key, value in changes(recipe, function).items() if key not in arguments}


def _path(recipe: Recipe, key: str, arguments: Mapping[str, Any]) -> str:
    _refuse_fixed(key)
    known = fields(recipe)
    head, _, option = key.rpartition(".")
    if key in known or (option and head in ("model.options", "task.options")):
        return key
    ends = [name for name in known if name.endswith(f".{key}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise InputError(
            f"`{key}`", expected="one field", got=f"{len(ends)}", fix=f"Write {' or '.join(sorted(ends))}."
        )
    names = {*known, *(name.rpartition(".")[2] for name in known), *arguments}
    raise InputError(
        f"`{key}`",
        expected=f"a key of the recipe {recipe.name}",
        got="an unknown one",
        fix=did_you_mean(key, names).partition(" Known:")[0] or f"Known: {', '.join(sorted(known))}.",
    )


def _called(function: RecipeFunction, own: Mapping[str, Any]) -> Recipe:
    try:
        return function(**own)
    except ValidationError as error:
        raise _refused(error) from error
    except ArithmeticError as error:
        raise InputError(
            "arguments of the recipe",
            expected="sizes above 0",
            got=", ".join(f"{key}={value}" for key, value in own.items()),
            fix="Raise the one that is 0.",
        ) from error


def _refuse_fixed(key: str) -> None:
    if key in FIXED:
        raise InputError(
            f"`{key}`",
            expected="a key that may be changed",
            got="what the recipe itself writes",
            fix="Take the recipe's argument model=…, or model.name=…, task.name=…, optimiser.name=….",
        )


def _at(recipe: Recipe, path: str) -> Any:
    value: Any = recipe.model_dump()
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _typed(key: str, value: Any, kind: Any) -> Any:
    try:
        checked: Any = Annotated[kind, BeforeValidator(partial(no_boolean, kind=kind))]
        return TypeAdapter(checked).validate_python(value)
    except ValidationError as error:
        raise _refused(error, key) from error


def _refused(error: ValidationError, key: str = "") -> InputError:
    first = error.errors()[0]
    place = key or ".".join(str(step) for step in first["loc"])
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    allowed = first.get("ctx", {}).get("expected")
    value = first.get("input")
    fix = f"Give {place} such a value; `rankwise train RECIPE --show` has the one of the recipe."
    if allowed and isinstance(value, str):
        guess = did_you_mean(value, [word.strip("' ") for word in allowed.replace(" or ", ",").split(",")])
        fix = guess or fix
    return InputError(f"`{place}`", expected=wanted, got=repr(value), fix=fix)
