"""Changes to a model that exists: λ-skips, put in, taken out, fitted, certified, saved and loaded."""

from rankwise.errors import SkipError
from rankwise.surgery.advice import advise
from rankwise.surgery.certificate import LayerCertificate, SkipCertificate, StackCertificate
from rankwise.surgery.certify import certify_skip
from rankwise.surgery.fit import Fit, fit_skips, mean_loss, skip_parameter_groups, state_collapse
from rankwise.surgery.skips import Skips, SkipSite, add_lambda_skip, remove_lambda_skip, skips_of
from rankwise.surgery.store import apply_saved_skips, has_skips, load_skips, save_skips

__all__ = [
    "Fit",
    "LayerCertificate",
    "SkipCertificate",
    "SkipError",
    "SkipSite",
    "Skips",
    "StackCertificate",
    "add_lambda_skip",
    "advise",
    "apply_saved_skips",
    "certify_skip",
    "fit_skips",
    "has_skips",
    "load_skips",
    "mean_loss",
    "remove_lambda_skip",
    "save_skips",
    "skip_parameter_groups",
    "skips_of",
    "state_collapse",
]
