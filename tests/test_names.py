"""A field of a record has the name of a public function only if both mean the same number."""

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import rankwise
from rankwise.auditing import Finding

MEASURES = {
    "absolute_spread", "effective_rank", "first_token_mass", "identity_distance", "max_token_mass",
    "direction_spread", "effective_rank_without_massive", "largest_norm_ratio", "largest_norm_share",
    "massive_tokens", "mean_cosine", "numerical_rank", "relative_update", "required_head_dim",
    "row_entropy", "row_spread", "spread", "stable_rank", "variational_rate",
}  # fmt: skip
"""Fields that are the mean, over sequences, of the function of `rankwise.measures` with the same name."""
MAXIMA = {"largest_logit"}
"""Fields that are the maximum, over sequences, of the function of `rankwise.measures` with the same name."""
REFERENCES = {"uniform_rank"}
"""Fields that are the mean, over sequences, of the function of `rankwise.theory` with the same name."""


def public_functions() -> Iterator[str]:
    """Yield the names of functions in `__all__` of the package and its public packages."""
    packages = [
        module.name for module in pkgutil.iter_modules(rankwise.__path__, "rankwise.") if module.ispkg
    ]
    for name in ("rankwise", *(package for package in packages if not package.startswith("rankwise._"))):
        module = import_module(name)
        for public in getattr(module, "__all__", ()):
            if inspect.isroutine(getattr(module, public)):
                yield public


def records(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from records(kind)


def test_a_field_and_a_function_of_one_name_mean_the_same() -> None:
    for module in pkgutil.walk_packages(rankwise.__path__, "rankwise."):
        if module.name.endswith((".records", ".record", ".result", ".comparison", ".match_findings")):
            import_module(module.name)
    fields = {name for kind in records(Finding.__base__) for name in kind.model_fields}
    assert fields & {*public_functions()} == MEASURES | MAXIMA | REFERENCES
