"""ToST (Token Statistics Transformer) and other token mixers as Hugging Face models, with released weights.

Importing this package registers ``model_type = "tost"`` with the Auto classes of transformers, and with the
lists of class names by which transformers and peft recognize a model.
"""

import re
from importlib import import_module

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)
from transformers.models.auto import modeling_auto

from rankwise._internals.parameters import parameter_groups
from rankwise.models.classification import ToSTForSequenceClassification
from rankwise.models.configuration import ToSTConfig
from rankwise.models.conversion import load_released_tost, save_model
from rankwise.models.language import ToSTForCausalLM, ToSTModel
from rankwise.models.mixer_cache import MixerCache
from rankwise.models.mixers import (
    MIXERS,
    S4D,
    LinearAttention,
    Mamba,
    Mamba2,
    Mixer,
    MixerOutput,
    SoftmaxAttention,
    TokenStatisticsAttention,
)
from rankwise.models.released import PRESETS, preset
from rankwise.models.vision import ToSTForImageClassification

AutoConfig.register("tost", ToSTConfig, exist_ok=True)
AutoModel.register(ToSTConfig, ToSTModel, exist_ok=True)
AutoModelForCausalLM.register(ToSTConfig, ToSTForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(ToSTConfig, ToSTForSequenceClassification, exist_ok=True)
AutoModelForImageClassification.register(ToSTConfig, ToSTForImageClassification, exist_ok=True)

# `register` does not add to the lists of class names: `Trainer` reads them to decide whether label smoothing
# shifts labels, model cards to name the task, and lm-evaluation-harness to choose the type of the model.
modeling_auto.MODEL_MAPPING_NAMES["tost"] = "ToSTModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["tost"] = "ToSTForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["tost"] = "ToSTForSequenceClassification"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["tost"] = "ToSTForImageClassification"

ADAPTED = {
    "LNTUNING_TARGET": ["mixer_norm", "mlp_norm", "norm"],
    "IA3_TARGET": ["mixer.in_proj", "k_proj", "v_proj", "mlp.out_proj"],
    "IA3_FEEDFORWARD": ["mlp.out_proj"],
}
"""Modules that these adapters of peft change by default. All other adapters change mixer projections."""


def _register_adapters() -> None:
    """Add ToST models to the lists of default targets of peft, if peft can be imported."""
    try:
        constants = import_module("peft.utils.constants")
    except Exception:  # a peft that is broken, or older than transformers, may raise any error
        return
    for name, targets in vars(constants).items():
        if match := re.fullmatch("TRANSFORMERS_MODELS_TO_(.+)_MODULES_MAPPING", name):
            targets["tost"] = ADAPTED.get(match[1], ["mixer.in_proj", "q_proj", "v_proj"])


_register_adapters()

__all__ = [
    "MIXERS", "PRESETS", "S4D", "LinearAttention", "Mamba", "Mamba2", "Mixer", "MixerCache", "MixerOutput",
    "SoftmaxAttention", "ToSTConfig", "ToSTForCausalLM", "ToSTForImageClassification",
    "ToSTForSequenceClassification", "ToSTModel", "TokenStatisticsAttention", "load_released_tost",
    "parameter_groups", "preset", "save_model",
]  # fmt: skip
