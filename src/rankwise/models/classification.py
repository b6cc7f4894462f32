"""Classifier of text sequences: `ToSTModel`, pooling over tokens, and a linear head."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from rankwise.models.configuration import ToSTConfig
from rankwise.models.language import ToSTModel
from rankwise.models.pretrained import ToSTPreTrainedModel


class ToSTForSequenceClassification(ToSTPreTrainedModel):
    """Classifier of text sequences: a linear head that reads one vector per sequence.

    The configuration field ``pooling`` selects this vector: the state of the last real token, or the mean
    over real tokens.

    Examples:
        >>> import torch
        >>> config = ToSTConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                     causal=False, num_labels=3)
        >>> ToSTForSequenceClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3])
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__(config)
        self.model = ToSTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        position_ids: Int[Tensor, "..."] | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Shaped[Tensor, "..."] | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits per sequence, (B, num_labels), and a loss if labels are passed.

        All other arguments have the same meaning as for `ToSTModel`.

        Args:
            attention_mask: 1 (or true) for real tokens; padding may be on either side. Without a mask, only
                ``pad_token_id`` at the right end of ``input_ids`` counts as padding.
            labels: class indices, or target values if ``problem_type`` is regression.
            **kwargs: arguments of the loss, and arguments of `ToSTModel`.
        """
        options = self._loss_options(kwargs)
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = _mask_without_end(input_ids, self.config.pad_token_id)
        output = self.model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, use_cache=False,
            output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        tokens = output.last_hidden_state
        real = tokens.new_ones(tokens.shape[:2]) if attention_mask is None else attention_mask
        pooled = _last(tokens, real.bool()) if self.config.pooling == "last" else _mean(tokens, real.bool())
        logits = self.classifier(pooled)
        loss = None if labels is None else self._classification_loss(labels, logits, options)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=output.hidden_states)


def _mask_without_end(input_ids: Int[Tensor, "B T"], pad: int) -> Bool[Tensor, "B T"]:
    """Return a mask that is False for padding tokens at the right end and True for all other tokens.

    Examples:
        >>> _mask_without_end(torch.tensor([[0, 5, 0, 6, 0, 0]]), 0).long().tolist()
        [[1, 1, 1, 1, 0, 0]]
    """
    return (input_ids != pad).flip(1).cumsum(1).flip(1) > 0


def _last(tokens: Float[Tensor, "B T D"], real: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    """Return the state of the last real token of each sequence, or of its first token if no token is real."""
    places = torch.arange(tokens.shape[1], device=tokens.device) * real
    return tokens[torch.arange(len(tokens), device=tokens.device), places.argmax(1)]


def _mean(tokens: Float[Tensor, "B T D"], real: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    """Return the mean state of the real tokens of each sequence; zeros if no token is real."""
    summed = tokens.masked_fill(~real[..., None], 0.0).sum(1)
    return summed / real.sum(1, keepdim=True).clamp(min=1)
