"""Settings of an audit, checked before there is a model: those that a monitor passes on."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rankwise.auditing.fresh_copies import check_baseline
from rankwise.auditing.importance_numbers import check_importance
from rankwise.auditing.numbers import check_method
from rankwise.auditing.pictures import chosen_heads
from rankwise.auditing.provenance import check_provenance
from rankwise.auditing.run import audit
from rankwise.errors import InputError, did_you_mean
from rankwise.measures import check_delta

OTHERWISE_GIVEN = ("model", "batches", "texts", "tokens", "batch_size")
"""Arguments of `audit` that say what is audited, and no more of how."""


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Refuse settings that `rankwise.audit` does not take.

    Args:
        settings: by name.

    Returns:
        The settings.

    Raises:
        RankwiseError: if there is no such setting, or it does not take such a value.
    """
    known = [name for name in inspect.signature(audit).parameters if name not in OTHERWISE_GIVEN]
    checks: dict[str, Callable[[Any], object]] = {
        "delta": check_delta,
        "method": check_method,
        "sites": _check_sites,
        "blocks": _check_blocks,
        "matrices": chosen_heads,
        "importance": check_importance,
        "baseline": check_baseline,
        "provenance": lambda given: check_provenance(given or {}),
        "on_progress": lambda given: check_callable("on_progress", given),
    }
    for name, value in settings.items():
        if name not in known:
            raise InputError(
                f"`{name}`",
                expected="a setting of `rankwise.audit`",
                got="an unknown one",
                fix=did_you_mean(name, known),
            )
        checks.get(name, lambda given: None)(value)
    return settings


def _check_sites(sites: Any) -> None:
    named = isinstance(sites, Mapping) and all(isinstance(name, str) for name in sites)
    if sites is not None and not (named and all(map(callable, sites.values()))):
        raise InputError(
            "`sites`",
            expected="a dict from names of modules to functions",
            got=repr(sites),
            fix="`sites={'layers.0.mixer': f}`, as in `rankwise.capture`.",
        )


def _check_blocks(blocks: Any) -> None:
    if blocks is not None and not isinstance(blocks, str):
        raise InputError(
            "`blocks`",
            expected="names of the residual blocks as a string",
            got=repr(blocks),
            fix="`blocks='layers.*'`, as in `rankwise.capture`.",
        )


def check_callable(name: str, given: Any) -> None:
    """Refuse what cannot be called.

    Args:
        name: of the argument.
        given: a function or None.

    Raises:
        InputError: if it is neither.
    """
    if given is not None and not callable(given):
        raise InputError(
            f"`{name}`", expected="a function", got=repr(given), fix="Give a function, or leave it out."
        )
