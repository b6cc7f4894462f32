"""ToST (Token Statistics Transformer) and other token mixers as Hugging Face models, with released weights.

Importing this package registers ``model_type = "tost"`` with the Auto classes of transformers.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

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
from rankwise.models.pretrained import parameter_groups
from rankwise.models.released import PRESETS, preset
from rankwise.models.vision import ToSTForImageClassification

AutoConfig.register("tost", ToSTConfig, exist_ok=True)
AutoModel.register(ToSTConfig, ToSTModel, exist_ok=True)
AutoModelForCausalLM.register(ToSTConfig, ToSTForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(ToSTConfig, ToSTForSequenceClassification, exist_ok=True)
AutoModelForImageClassification.register(ToSTConfig, ToSTForImageClassification, exist_ok=True)

__all__ = [
    "MIXERS", "PRESETS", "S4D", "LinearAttention", "Mamba", "Mamba2", "Mixer", "MixerCache", "MixerOutput",
    "SoftmaxAttention", "ToSTConfig", "ToSTForCausalLM", "ToSTForImageClassification",
    "ToSTForSequenceClassification", "ToSTModel", "TokenStatisticsAttention", "load_released_tost",
    "parameter_groups", "preset", "save_model",
]  # fmt: skip
