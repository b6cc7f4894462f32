"""The copies of a model at fresh weights that an audit is held against, one at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rankwise._internals.torch_private import original_of
from rankwise.auditing.initialization import FreshWeightsError, reinitialized, way_to_fresh_weights
from rankwise.errors import InputError

SEEDS = 3
"""Copies where no number is given: two do not tell a spread, and each costs an audit."""


@dataclass(frozen=True)
class BaselineSettings:
    """How the copies at fresh weights are made.

    Args:
        seeds: how many, from seed 0 on.
        build: builds the model for a seed, where the model itself cannot say how.
    """

    seeds: int = SEEDS
    build: Callable[[int], nn.Module] | None = None


BaselineWanted = bool | int | Callable[[int], nn.Module] | BaselineSettings


def check_baseline(wanted: BaselineWanted) -> BaselineSettings | None:
    """How copies at fresh weights are to be made, if they are.

    Args:
        wanted: True, False, a number of seeds, a function of a seed, or settings.

    Raises:
        InputError: if it is none of these.
    """
    if isinstance(wanted, bool):
        return BaselineSettings() if wanted else None
    if isinstance(wanted, int):
        wanted = BaselineSettings(wanted)
    elif callable(wanted) and not isinstance(wanted, nn.Module):
        wanted = BaselineSettings(build=wanted)
    seeds = wanted.seeds if isinstance(wanted, BaselineSettings) else 0
    if isinstance(wanted, BaselineSettings) and isinstance(seeds, int) and seeds >= 1:
        return wanted
    raise InputError(
        "`baseline`",
        expected="True, a number of seeds from 1 on, a function of a seed that builds the model, or "
        "`BaselineSettings`",
        got=type(wanted).__name__ if isinstance(wanted, nn.Module) else repr(wanted),
        fix="`baseline=3` audits the model at three fresh sets of weights besides.",
    )


class FreshCopies:
    """Copies of a model at fresh weights, one at a time.

    The first is made at once: what cannot be rebuilt is refused before anything is measured.

    Args:
        model: the model; it is not changed, nor is the random state of torch.
        settings: how many, and how they are built.
    """

    def __init__(self, model: nn.Module, settings: BaselineSettings) -> None:
        self.model, self.settings = original_of(model), settings
        self.built = way_to_fresh_weights(self.model) if settings.build is None else "by the function given"
        self._first: nn.Module | None = self._made(0)

    def __len__(self) -> int:
        return self.settings.seeds

    def __iter__(self) -> Iterator[tuple[int, nn.Module]]:
        """Each seed and its copy, of which none is kept here."""
        for seed in range(self.settings.seeds):
            first, self._first = self._first, None
            yield seed, self._made(seed) if first is None else first
            del first

    @contextmanager
    def random_state_kept(self) -> Iterator[None]:
        """Whatever the copies draw while they run, such as dropout."""
        cuda = {
            parameter.device.index or 0
            for parameter in self.model.parameters()
            if parameter.device.type == "cuda"
        }
        with torch.random.fork_rng(sorted(cuda)):
            yield

    def _made(self, seed: int) -> nn.Module:
        build = self.settings.build
        try:
            return reinitialized(self.model, seed, None if build is None else lambda: build(seed))
        except FreshWeightsError as error:
            raise FreshWeightsError(
                error.subject,
                expected=error.expected,
                got=error.got,
                fix="Audit without a baseline, or give a function of a seed that builds the same model at "
                "fresh weights, `rw.audit(…, baseline=build)`.",
            ) from error
