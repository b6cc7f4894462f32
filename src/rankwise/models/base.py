"""What all our Hugging Face models share."""

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from rankwise.models.configuration import ToSTConfig


class ToSTPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = ToSTConfig
    config: ToSTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012  (transformers reads a list)
    _is_stateful = True  # a state cannot be rolled back, so no assisted decoding

    def _init_weights(self, module: nn.Module) -> None:
        """Start as GPT-2 does; a module with values of its own sets them itself."""
        super()._init_weights(module)
        if isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        if isinstance(module, nn.Linear) and getattr(module, "ends_branch", False):
            deviation = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(module.weight, std=deviation)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None and type(module).__module__.startswith("rankwise."):
            reset()
