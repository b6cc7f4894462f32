"""Add, remove, certify, save, try and recommend λ-skips: skip connections λ·x + f(x) in a model."""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise.errors import SkipError
    from rankwise.skips.add import Skips, add_lambda_skip, remove_lambda_skip, skips_of
    from rankwise.skips.certify import certify_skip
    from rankwise.skips.hook_places import SkipPlace
    from rankwise.skips.lambda_skip import LambdaSkip
    from rankwise.skips.recommendation import choose_lambda, direction_spread_by_layer, recommend
    from rankwise.skips.records import LambdaChoice, LayerCertificate, SkipCertificate
    from rankwise.skips.save import load_skips, save_skips
    from rankwise.skips.trial import try_lambdas

__all__ = [
    "LambdaChoice", "LambdaSkip", "LayerCertificate", "SkipCertificate", "SkipError", "SkipPlace", "Skips",
    "add_lambda_skip", "certify_skip", "choose_lambda", "direction_spread_by_layer", "load_skips",
    "recommend", "remove_lambda_skip", "save_skips", "skips_of", "try_lambdas",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(__name__)
