"""The image classifier in the released frame."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from rankwise.errors import InputError
from rankwise.models.base import ToSTPreTrainedModel
from rankwise.models.block import Block, make_norm
from rankwise.models.class_attention import ClassAttentionBlock
from rankwise.models.configuration import ToSTConfig
from rankwise.models.patches import FourierPositions, PatchEmbedding


class ToSTForImageClassification(ToSTPreTrainedModel):
    """Convolutions, Fourier positions, blocks over patches, class attention, a head on the class token.

    Source: the released vision models (XCiT's frame with TSSA in the place of cross-covariance attention and
    without its local patch interaction).

    Examples:
        >>> import torch
        >>> config = ToSTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, causal=False,
        ...                     patch_size=8, num_labels=3)
        >>> ToSTForImageClassification(config).eval()(torch.randn(2, 3, 32, 24)).logits.shape
        torch.Size([2, 3])
    """

    main_input_name = "pixel_values"
    _no_split_modules = ["Block", "ClassAttentionBlock"]  # noqa: RUF012

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__(config)
        if config.causal:
            raise InputError(
                "ToSTForImageClassification",
                expected="causal=False",
                got="causal=True",
                fix="An image has no order: set causal=False.",
            )
        self.patch_embedding = PatchEmbedding(config)
        self.positions = FourierPositions(config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        readers = [ClassAttentionBlock(config) for _ in range(config.class_attention_layers)]
        self.layers = nn.ModuleList([*blocks, *readers])
        self.norm = make_norm(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.gradient_checkpointing = False
        self.post_init()

    def reset_parameters(self) -> None:
        """The class token starts small and random; everything else starts by itself."""
        nn.init.trunc_normal_(self.class_token, std=self.config.initializer_range)

    def forward(
        self,
        pixel_values: Float[Tensor, "B C Y X"],
        labels: Int[Tensor, " B"] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput | tuple[Any, ...]:
        """Classify images.

        Args:
            pixel_values: images, of any size that the patches tile.
            labels: the classes, for a loss.
            output_hidden_states: whether to give back the patches as each block reads them, and the last
                norm's output, class token first.
            return_dict: an object with names, or a tuple.
            **kwargs: passed to the loss; otherwise only what transformers passes to every model.

        Raises:
            InputError: for images that patches do not tile, and arguments that would be ignored.
        """
        options = self._loss_options(kwargs)
        grid = self.patch_embedding(pixel_values)
        x = (grid + self.positions(*grid.shape[2:])).flatten(2).transpose(1, 2)
        x = self.dropout(x)
        shown = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: tuple[Tensor, ...] = ()
        blocks = self.config.num_hidden_layers
        for layer in self.layers[:blocks]:
            states += (x,) if shown else ()
            x, _ = layer(x)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers[blocks:]:
            states += (x,) if shown else ()
            x = layer(x)
        x = self.norm(x)
        logits = self.classifier(x[:, 0])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **options)
        output = ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=(*states, x) if shown else None
        )
        named = self.config.return_dict if return_dict is None else return_dict
        return output if named else output.to_tuple()
