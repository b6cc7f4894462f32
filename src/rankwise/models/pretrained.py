"""Base class of all models: initialization, shared λ and argument checks."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from rankwise.errors import InputError, did_you_mean
from rankwise.models.configuration import ToSTConfig
from rankwise.skips.lambda_skip import LambdaSkip

LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Keyword arguments that the loss functions of transformers accept."""

MEAN_LOSSES = ("regression", "multi_label_classification")
"""Problem types for which the loss function of transformers ignores ``num_items_in_batch``."""

IGNORED = ("output_attentions", "cache_position", "token_type_ids", "use_cache")
"""Arguments that tokenizers, `generate` and wrappers pass to every model, and that these models ignore."""

PACKED = "The mixers do not read where packed texts end, and would mix them: give each a row, and a mask."
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments by which transformers marks several texts packed into one row; these models reject them."""

PLACE = ("subfolder", "revision", "token", "cache_dir", "local_files_only")
"""Arguments that say where the files of a model are."""


class ToSTPreTrainedModel(PreTrainedModel):
    """Base class of all models in `rankwise.models`: loading, saving and weight initialization."""

    config_class = ToSTConfig
    config: ToSTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _tied_weights_keys: dict[str, str] | None = None
    _no_split_modules = ["Block"]  # noqa: RUF012  (transformers reads a list)
    _is_stateful = True  # disables assisted decoding, which would have to remove tokens from states

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load a model as transformers does; raise InputError if its files lack weights.

        Weights of a head may be missing. Weights may also be missing if only a changed configuration, and not
        the saved configuration, needs them.
        """
        model, loading = super().from_pretrained(name, *args, output_loading_info=True, **options)
        prefix = f"{cls.base_model_prefix}." if hasattr(model, cls.base_model_prefix) else ""
        missing = sorted(weight for weight in loading["missing_keys"] if weight.startswith(prefix))
        if missing:
            where = {key: options[key] for key in PLACE if key in options}
            saved = model.config if name is None else cls.config_class.from_pretrained(name, **where)
            with torch.device("meta"):
                expected = cls(saved).state_dict()
            missing = [weight for weight in missing if weight in expected]
        if missing:
            raise InputError(
                f"weights of {cls.__name__}",
                expected="all weights of its configuration",
                got=f"{len(missing)} missing, such as {missing[0]!r}",
                fix="Save the model again by `save_pretrained`.",
            )
        return (model, loading) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module as in GPT-2, or by the module's `reset_parameters` if it is of this package."""
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
        """Declare a shared λ as tied weights, so that λ is saved once; then initialize the model."""
        self._tied_weights_keys = {**(self._tied_weights_keys or {}), **self._shared_skips()}
        super().post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return tied weights as {name: source name}. A shared λ is among them even if embeddings are not."""
        return {**super().get_expanded_tied_weights_keys(all_submodels), **self._shared_skips()}

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie weights; raise InputError if λ is shared by configuration but the loaded values differ."""
        super().tie_weights(*args, **kwargs)
        tied = self._shared_skips()
        weights = [self.get_parameter(name) for name in dict.fromkeys((*tied.values(), *tied))]
        loaded = [weight for weight in weights if not weight.is_meta]  # meta tensors are not loaded yet
        if any(weight is not loaded[0] for weight in loaded):
            raise InputError(
                f"weights of {type(self).__name__}",
                expected='one λ for all layers, as skip="shared" says',
                got=f"one λ per layer: {', '.join(f'{weight.item():g}' for weight in loaded)}",
                fix='Load them with skip="learned".',
            )

    def _shared_skips(self) -> dict[str, str]:
        """Return {weight name: weight name of the first λ} for every shared λ except the first."""
        modules = self.named_modules()
        skips = [name for name, skip in modules if isinstance(skip, LambdaSkip) and skip.kind == "shared"]
        return {f"{name}.weight": f"{skips[0]}.weight" for name in skips[1:]}

    def _loss_options(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for the loss; raise InputError for an unknown keyword argument."""
        options = {name: value for name, value in others.items() if value is not None}
        for name in options:
            if name in PACKING and self.main_input_name == "input_ids":
                raise InputError(f"`{name}`", expected="one text per row", got="several, packed", fix=PACKED)
            if name not in (*LOSS, *IGNORED):
                arguments = [key for key in inspect.signature(self.forward).parameters if key != "kwargs"]
                raise InputError(
                    f"`{name}`",
                    expected=f"an argument of {type(self).__name__}",
                    got="an unknown argument",
                    fix=did_you_mean(name, arguments),
                )
        return {name: value for name, value in options.items() if name in LOSS}

    def _classification_loss(self, labels: Tensor, logits: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the loss of a classifier, divided by ``num_items_in_batch`` if this option is passed.

        The loss functions of transformers divide by this number for single labels only. For target values and
        several labels, they return a mean. `Trainer` adds up the losses of batches whose gradients it
        accumulates, so a mean of each batch would be wrong.
        """
        loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **options)
        items, by_labels = options.get("num_items_in_batch"), self.config.problem_type in MEAN_LOSSES
        if items is None or not by_labels or self.loss_function is not ForSequenceClassificationLoss:
            return loss
        return loss * labels.numel() / torch.as_tensor(items, device=loss.device)
