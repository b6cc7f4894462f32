"""Changes to a model that exists: λ-skips, put in, taken out, fitted, certified, saved and loaded; softmax
attention replaced by mixers of linear time.
"""

from typing import TYPE_CHECKING

from rankwise._internals.lazy import lazy_names

if TYPE_CHECKING:
    from rankwise.errors import ReplacementError, SkipError
    from rankwise.skips.advice import recommend
    from rankwise.skips.certificate import LayerCertificate, SkipCertificate, StackCertificate
    from rankwise.skips.certify import certify_skip
    from rankwise.skips.fit import Fit, fit_skips, mean_loss, skip_parameter_groups, state_collapse
    from rankwise.skips.modules import LambdaSkip
    from rankwise.skips.replace import replace_attention, replacements_of, restore_attention
    from rankwise.skips.replace_store import load_replaced_attention, save_replaced_attention
    from rankwise.skips.replacement import Replacement
    from rankwise.skips.skips import Skips, SkipSite, add_lambda_skip, remove_lambda_skip, skips_of
    from rankwise.skips.store import apply_saved_skips, has_skips, load_skips, save_skips

__all__ = [
    "Fit", "LambdaSkip", "LayerCertificate", "Replacement", "ReplacementError", "SkipCertificate",
    "SkipError", "SkipSite", "Skips", "StackCertificate", "add_lambda_skip", "apply_saved_skips",
    "certify_skip", "fit_skips", "has_skips", "load_replaced_attention", "load_skips", "mean_loss",
    "recommend", "remove_lambda_skip", "replace_attention", "replacements_of", "restore_attention",
    "save_replaced_attention", "save_skips", "skip_parameter_groups", "skips_of", "state_collapse",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "advice": ("recommend",),
        "certificate": ("LayerCertificate", "SkipCertificate", "StackCertificate"),
        "certify": ("certify_skip",),
        "fit": ("Fit", "fit_skips", "mean_loss", "skip_parameter_groups", "state_collapse"),
        "modules": ("LambdaSkip",),
        "replace": ("replace_attention", "replacements_of", "restore_attention", "ReplacementError"),
        "replace_store": ("load_replaced_attention", "save_replaced_attention"),
        "replacement": ("Replacement",),
        "skips": ("Skips", "SkipSite", "add_lambda_skip", "remove_lambda_skip", "skips_of"),
        "store": ("apply_saved_skips", "has_skips", "load_skips", "save_skips", "SkipError"),
    },
)
