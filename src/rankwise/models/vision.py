"""Image classifier of the released models: patches, positions, blocks, class attention, linear head."""

import math
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import can_return_tuple

from rankwise.errors import InputError
from rankwise.models.block import Block, FeedForward, make_norm, make_scale
from rankwise.models.configuration import ToSTConfig
from rankwise.models.mixers.mixer import head_dim_of
from rankwise.models.pretrained import ToSTPreTrainedModel


class PatchEmbedding(nn.Module):
    """Patch embedding by 3×3 convolutions with stride 2, until each patch is one vector of D channels.

    Each convolution after the first doubles the channels. Each is followed by a batch norm, and GELU is
    applied before the next convolution.
    Source: El-Nouby et al., "XCiT: Cross-Covariance Image Transformers", NeurIPS 2021.
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        halvings = config.patch_size.bit_length() - 1
        if config.patch_size not in (2, 4, 8, 16) or config.hidden_size % 2 ** (halvings - 1):
            raise InputError(
                "ToSTConfig `patch_size`",
                expected="2, 4, 8 or 16, and a hidden_size that patch_size / 2 divides",
                got=f"patch_size={config.patch_size}, hidden_size={config.hidden_size}",
                fix="The released models use 16 or 8.",
            )
        widths = [config.num_channels] + [config.hidden_size >> i for i in reversed(range(halvings))]
        self.patch_size, self.num_channels = config.patch_size, config.num_channels
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])

    def forward(self, pixel_values: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B D Y2 X2"]:
        """Return patch tokens on a grid, (B, D, Y2, X2); raise if the patch size does not divide Y and X."""
        _, channels, height, width = pixel_values.shape
        if height % self.patch_size or width % self.patch_size or channels != self.num_channels:
            raise InputError(
                "`pixel_values`",
                expected=f"(B, {self.num_channels}, Y, X) with sides that {self.patch_size} divides",
                got=f"{tuple(pixel_values.shape)}",
                fix="Resize or crop the images.",
            )
        x = pixel_values
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(convolution(x if index == 0 else F.gelu(x)))
        return x


class FourierPositions(nn.Module):
    """Position encoding of image patches: a linear map of sines and cosines of row and column.

    Rows and columns are scaled to (0, 2π], so that images of any size can be encoded.
    Source: XCiT, see `PatchEmbedding`.

    Args:
        hidden_size: D, the model width.
        frequencies: total number of sines and cosines per axis (rows, columns).
        temperature: approximate ratio of the highest to the lowest frequency.
    """

    def __init__(self, hidden_size: int, frequencies: int = 32, temperature: float = 10_000.0) -> None:
        super().__init__()
        self.frequencies, self.temperature = frequencies, temperature
        self.projection = nn.Conv2d(2 * frequencies, hidden_size, kernel_size=1)

    def forward(self, rows: int, columns: int) -> Float[Tensor, "1 D Y X"]:
        """Return the encoding of a grid of patches, (1, D, rows, columns)."""
        weight = self.projection.weight
        down, across = self._axis(rows, weight.device), self._axis(columns, weight.device)
        grid = torch.cat([down[:, None].expand(-1, columns, -1), across.expand(rows, -1, -1)], -1)
        return self.projection(grid.permute(2, 0, 1)[None].to(weight.dtype))

    def _axis(self, places: int, device: torch.device) -> Float[Tensor, "Y F"]:
        """Return alternating sines and cosines for each position along one axis."""
        angle = torch.arange(1, places + 1, device=device) / (places + 1e-6) * (2 * math.pi)
        index = torch.arange(self.frequencies, device=device)
        scaled = angle[:, None] / self.temperature ** (2 * (index // 2) / self.frequencies)
        return torch.stack([scaled[:, 0::2].sin(), scaled[:, 1::2].cos()], -1).flatten(1)


class ClassAttention(nn.Module):
    """Softmax attention in which only the first token (class token) reads the T tokens.

    Cost: O(T D) time in addition to the projections of all tokens.
    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Section 3.
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_attention_heads
        head_dim_of("class attention", size, self.num_heads, None)
        self.qkv_proj = nn.Linear(size, 3 * size, bias=config.use_bias)
        self.out_proj = nn.Linear(size, size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B 1 D"]:
        """Return the attention output for the class token, without the skip connection."""
        query, key, value = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query[:, :, :1], key, value)
        return self.dropout(self.out_proj(mixed.transpose(1, 2).flatten(2)))


class ClassAttentionBlock(GradientCheckpointingLayer):
    """Layer in which the class token attends to all patches, as in the released models.

    Two peculiarities of the released code are kept, because trained weights depend on them:

    - Patches change too: a patch p becomes ``p + γ₁ norm₁(p)``, because the normalized patch is used as its
      attention output.
    - The skip connection of the feed-forward part starts after norm₂. The class token c becomes
      ``n + γ₂ mlp(n)`` with ``n = norm₂(c)``. With ``tokens_norm``, a patch p becomes ``2 norm₂(p)``,
      otherwise ``2 p``. The next norm removes the factor 2, except for the effect of ε.
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        self.tokens_norm = config.tokens_norm
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention, self.mlp = ClassAttention(config), FeedForward(config)
        self.attention_scale = make_scale(config.hidden_size, config.layer_scale)
        self.mlp_scale = make_scale(config.hidden_size, config.layer_scale)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return the new states: the class token first, then the patches."""
        normed = self.attention_norm(x)
        x = x + self.attention_scale(torch.cat([self.attention(normed), normed[:, 1:]], 1))
        token, patches = self.mlp_norm(x[:, :1]), x[:, 1:]
        patches = self.mlp_norm(patches) if self.tokens_norm else patches
        return torch.cat([token + self.mlp_scale(self.mlp(token)), 2 * patches], 1)


class ToSTForImageClassification(ToSTPreTrainedModel):
    """Image classifier: patch embedding, blocks over patches, class attention, and a linear head.

    The released vision models are XCiT models with TSSA (token statistics self-attention) instead of
    cross-covariance attention, and without local patch interaction.

    Examples:
        >>> import torch
        >>> config = ToSTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, causal=False,
        ...                     patch_size=8, num_labels=3)
        >>> ToSTForImageClassification(config).eval()(torch.randn(2, 3, 32, 24)).logits.shape
        torch.Size([2, 3])
    """

    main_input_name = "pixel_values"
    _no_split_modules = ["Block", "ClassAttentionBlock"]  # noqa: RUF012
    _input_embed_layer = "patch_embedding"

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
        class_blocks = [ClassAttentionBlock(config) for _ in range(config.class_attention_layers)]
        self.layers = nn.ModuleList([*blocks, *class_blocks])
        self.norm = make_norm(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.gradient_checkpointing = False
        self.post_init()

    def reset_parameters(self) -> None:
        """Initialize the class token with random numbers; submodules initialize their own weights."""
        nn.init.trunc_normal_(self.class_token, std=self.config.initializer_range)

    @can_return_tuple
    def forward(
        self,
        pixel_values: Float[Tensor, "B C Y X"],
        labels: Shaped[Tensor, "..."] | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Return logits per image, (B, num_labels), and a loss if labels are passed.

        Args:
            pixel_values: images whose sides are multiples of the patch size.
            labels: class indices, or target values if ``problem_type`` is regression.
            output_hidden_states: True to also return the input of each block and the output of the last norm;
                from the first class-attention layer on, the class token is first.
            **kwargs: arguments of the loss, and ignored arguments that transformers passes to every model.

        Raises:
            InputError: if the patch size does not divide the image sides, or an argument is unknown.
        """
        options = self._loss_options(kwargs)
        grid = self.patch_embedding(pixel_values)
        x = self.dropout((grid + self.positions(*grid.shape[2:])).flatten(2).transpose(1, 2))
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: tuple[Tensor, ...] = ()
        blocks = self.config.num_hidden_layers
        for layer in self.layers[:blocks]:
            states += (x,) if output_hidden_states else ()
            x, _ = layer(x)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers[blocks:]:
            states += (x,) if output_hidden_states else ()
            x = layer(x)
        x = self.norm(x)
        logits = self.classifier(x[:, 0])
        loss = None if labels is None else self._classification_loss(labels, logits, options)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=(*states, x) if output_hidden_states else None
        )
