"""Tasks that recipes name: functions of `rankwise.data.tasks`, and where each takes its data from."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankwise.data import tasks
from rankwise.errors import InputError, did_you_mean
from rankwise.train.settings import Recipe

if TYPE_CHECKING:
    from rankwise.data.tasks import Task

TASKS: dict[str, Callable[..., "Task"]] = {
    "bytes": tasks.byte_language_model,
    "tokens": tasks.token_language_model,
    "mqar": tasks.mqar,
    "listops": tasks.listops,
    "imdb-bytes": tasks.imdb_bytes,
    "cifar10": tasks.cifar10,
    "cifar10-sequence": tasks.cifar10_sequence,
    "cifar100": tasks.cifar100,
    "svhn": tasks.svhn,
    "pathfinder": tasks.pathfinder,
    "needle": tasks.needle,
}
"""By name. The first argument of those that read files is in `PLACES`: ``task.path``."""
SHAKESPEARE = (
    "Any UTF-8 text will do. Tiny Shakespeare (1.1 MB): curl -o shakespeare.txt "
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt; then "
    "task.path=shakespeare.txt"
)
LENGTH = ("length", "max_length")
PLACES = ("path", "source", "documents")


def make_task(recipe: Recipe) -> "Task":
    """The task of a recipe.

    Args:
        recipe: its ``task`` says which, and with what. Its seed is of weights and of the order of examples;
            what a task draws depends on ``task.options.seed`` alone, so that seeds differ on the same data.

    Raises:
        InputError: for an unknown name or option, and where data are missing or broken.
    """
    name = recipe.task.name
    if name not in TASKS:
        raise InputError("`task.name`", expected="a task", got=repr(name), fix=did_you_mean(name, TASKS))
    function = TASKS[name]
    parameters = inspect.signature(function).parameters
    given: dict[str, Any] = {}
    for option, value in recipe.task.options.items():
        if option not in parameters:
            raise InputError(
                f"`task.options.{option}`",
                expected=f"an option of the task {name}",
                got="an unknown one",
                fix=did_you_mean(option, parameters) or "It takes none.",
            )
        given[option] = value
    place = next((one for one in PLACES if one in parameters), None)
    if recipe.task.path is None and place and parameters[place].default is inspect.Parameter.empty:
        raise InputError(
            "`task.path`", expected=f"a text file for the task {name}", got="none", fix=SHAKESPEARE
        )
    if recipe.task.path is not None:
        if place is None:
            raise InputError(
                "`task.path`",
                expected="none: this task is generated",
                got=recipe.task.path,
                fix="Leave it out.",
            )
        given[place] = recipe.task.path
    given |= {one: recipe.task.tokens for one in LENGTH if one in parameters and one not in given}
    return function(**given)
