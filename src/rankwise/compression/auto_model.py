"""Compressed models in the files of transformers: ``from_pretrained`` builds them before it loads weights.

transformers lets a checkpoint name, in its configuration, who prepares the empty model: that is how quantized
models load. A compressed model is prepared in the same way, with nothing quantized. Importing this module
makes the name known; without it ``from_pretrained`` refuses such a checkpoint by that name.
"""

from typing import Any

from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from rankwise.compression.heads_modules import RemovedHeads
from rankwise.compression.qk_modules import narrow_projections
from rankwise.compression.structure import Structure, read_structure, rebuild, structure_of

NAME = "rankwise"
KEY = "quantization_config"
"""Where the configuration of a checkpoint says who prepares the model."""


class CompressionConfig(QuantizationConfigMixin):
    """The structure of a compressed model, inside its configuration."""

    def __init__(self, structure: Any = None, **_: Any) -> None:
        self.quant_method = NAME
        self.structure = structure if isinstance(structure, dict) else {"changes": []}

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        return {"quant_method": NAME, "structure": self.structure}


class CompressionBuilder(HfQuantizer):
    """Builds the structure into the empty model."""

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        structure = read_structure(self.quantization_config.structure, "the configuration")
        rebuild(model, _named_for(model, structure))
        for _name, projection in narrow_projections(model):
            projection.loading = True
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for _name, projection in narrow_projections(model):
            projection.place_channels()
            projection.loading = False
        # Nothing is quantized: what trains, moves or compiles quantized models otherwise need not know.
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False  # type: ignore[assignment]
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None and getattr(config, "_is_quantized", False):
                config._is_quantized = False
        return model

    def is_serializable(self) -> bool:
        """It is."""
        return True

    @property
    def is_trainable(self) -> bool:
        """It is."""
        return True


def _named_for(model: nn.Module, structure: Structure) -> Structure:
    """Names with or without the prefix that a model with a head puts before the same modules."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    modules = {name for name, _ in model.named_modules()}

    def name(old: str) -> str:
        others = (old.removeprefix(prefix), prefix + old)
        return old if old in modules else next((new for new in others if new in modules), old)

    changes = [
        change.renamed(name(change.module))
        if isinstance(change, RemovedHeads)
        else change.model_copy(
            update={key: name(getattr(change, key)) for key in ("module", "rotary") if hasattr(change, key)}
        )
        for change in structure.changes
    ]
    return structure.model_copy(update={"changes": changes})


def note_structure(model: Any) -> None:
    """Write the structure of a compressed model into its configuration, or take it out where nothing is left.

    Args:
        model: a model of transformers.
    """
    structure = structure_of(model)
    if structure.changes:
        setattr(model.config, KEY, CompressionConfig(structure=structure.model_dump(mode="json")))
    elif structure_in(model.config) is not None:
        delattr(model.config, KEY)


def structure_in(config: Any) -> Structure | None:
    """The structure that a configuration holds.

    Args:
        config: of a model of transformers.
    """
    noted = getattr(config, KEY, None)
    if isinstance(noted, CompressionConfig):
        noted = noted.to_dict()
    if not isinstance(noted, dict) or noted.get("quant_method") != NAME:
        return None
    return read_structure(noted.get("structure"), "the configuration")


if NAME not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(NAME)(CompressionConfig)
    register_quantizer(NAME)(CompressionBuilder)
