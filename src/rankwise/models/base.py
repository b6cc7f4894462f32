"""What all our Hugging Face models share."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from rankwise.errors import InputError, did_you_mean
from rankwise.models.configuration import ToSTConfig
from rankwise.skips.modules import LambdaSkip

LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""What transformers' losses take."""

PASSED_BY = ("output_attentions", "cache_position", "token_type_ids", "use_cache")
"""What tokenizers, `generate` and wrappers pass to every model, and what changes nothing in ours."""

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""How transformers says that several texts stand in one row."""


class ToSTPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = ToSTConfig
    config: ToSTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _tied_weights_keys: dict[str, str] | None = None
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

    def post_init(self) -> None:
        """Name a shared λ among the weights that saving writes once, then start as transformers does."""
        self._tied_weights_keys = {**(self._tied_weights_keys or {}), **self._shared_skips()}
        super().post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Which weights are tied to which: a shared λ also where embeddings are not.

        Args:
            all_submodels: of transformers.
        """
        return {**super().get_expanded_tied_weights_keys(all_submodels), **self._shared_skips()}

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie, and see that a shared λ is one.

        Args:
            *args: of transformers.
            **kwargs: of transformers.

        Raises:
            InputError: if weights that were loaded have a λ of its own for each layer.
        """
        super().tie_weights(*args, **kwargs)
        tied = self._shared_skips()
        weights = [self.get_parameter(name) for name in dict.fromkeys((*tied.values(), *tied))]
        found = [weight for weight in weights if not weight.is_meta]  # on meta nothing is loaded yet
        if any(weight is not found[0] for weight in found):
            raise InputError(
                f"weights of {type(self).__name__}",
                expected='one λ for all layers, as skip="shared" says',
                got=f"of its own for each: {', '.join(f'{weight.item():g}' for weight in found)}",
                fix='Load them with skip="learned".',
            )

    def _shared_skips(self) -> dict[str, str]:
        named = self.named_modules()
        skips = [name for name, one in named if isinstance(one, LambdaSkip) and one.kind == "shared"]
        return {f"{name}.weight": f"{skips[0]}.weight" for name in skips[1:]}

    def _loss_options(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Of further keyword arguments those of a loss; the rest must be harmless.

        Raises:
            InputError: for one that would be ignored although it was meant to change something.
        """
        given = {name: value for name, value in others.items() if value is not None}
        for name in given:
            if name in PACKING:
                raise InputError(
                    f"`{name}`",
                    expected="one text in a row",
                    got="several, packed",
                    fix="TSSA does not read where packed texts end: give each a row, and a mask.",
                )
            if name not in (*LOSS, *PASSED_BY):
                known = [known for known in inspect.signature(self.forward).parameters if known != "kwargs"]
                raise InputError(
                    f"`{name}`",
                    expected=f"an argument of {type(self).__name__}",
                    got="an unknown one",
                    fix=did_you_mean(name, known),
                )
        return {name: value for name, value in given.items() if name in LOSS}
