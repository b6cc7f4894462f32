"""Configuration class of all models in `rankwise.models`."""

import inspect
import json
import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from rankwise.errors import InputError, in_range, one_of, whole_number
from rankwise.models.mixers import MIXERS
from rankwise.models.mixers.mixer import head_dim_of
from rankwise.models.mixers.tssa import HalfLife, check_half_life

CHOICES = {
    "norm": ("layer", "rms", "none"),
    "norm_position": ("pre", "post"),
    "skip": ("none", "fixed", "learned", "channel", "shared"),
    "position_embeddings": ("learned", "none"),
    "pooling": ("last", "mean"),
}
"""Allowed values of each field whose value is a name."""
FLAGS = ("causal", "position_bias", "use_bias", "gate", "use_cache", "tokens_norm", "tie_word_embeddings")
POSITIVE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "image_size",
            "num_channels", "max_position_embeddings")  # fmt: skip
"""Fields that must be integers of at least 1."""
FINITE = ("layer_scale", "skip_init", "norm_eps", "initializer_range")


class ToSTConfig(PreTrainedConfig):
    """Configuration of all models in `rankwise.models`: the mixer of each layer, and the block around it.

    The defaults describe a language model of the released base size, but without LayerScale. The function
    `rankwise.models.preset` returns the released configurations. ``mixer_options`` sets mixer arguments
    that are not fields, as in ``{"tssa": {"conv_tokens": 4, "features": 16}}``. TSSA is token statistics
    self-attention.

    Source: Wu et al., "Token Statistics Transformer: Linear-Time Attention via Variational Rate Reduction",
    and the released code. The fields for norm, skip and gate are options of this package only.

    Args:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: D, the model width.
        num_hidden_layers: L, the number of blocks.
        num_attention_heads: H, the number of heads of every mixer.
        head_dim: K, the width of each head; D / H by default.
        intermediate_size: width of the feed-forward part; 4 D by default, 0 for no feed-forward part.
        hidden_act: activation of the feed-forward part, as named in transformers.
        max_position_embeddings: largest number of tokens, if positions or a position bias are learned.
        layer_types: mixer of each layer, a name in `rankwise.models.MIXERS`. One name applies to all
            layers; ``tssa`` by default.
        mixer_options: additional arguments of mixers, by mixer name.
        causal: True if each token reads only itself and earlier tokens.
        half_life: number of tokens after which a token counts half in the sums of causal TSSA, for all heads
            or per head. None means no decay, as in the released models; by default, no head decays.
            `rankwise.ops.half_lives` returns half-lives on a logarithmic scale.
        position_bias: True for a learned bias per position in causal TSSA, as in the released models. The
            default is True if ``causal`` and no half-life is passed.
        position_embeddings: ``learned``, or ``none``, with which embeddings do not limit the length.
        norm: ``layer``, ``rms`` or ``none``.
        norm_position: ``pre`` (norm before the mixer or feed-forward part) or ``post`` (norm after its skip).
        norm_eps: constant ε that norms add to the variance.
        use_bias: True for biases in linear layers and norms.
        layer_scale: initial value of the learned `LayerScale` factors of each block; None for no factors.
        skip: λ of the skip connection λ x around the mixer: ``fixed``, ``learned`` per layer, learned per
            ``channel`` and layer, or learned and ``shared`` by all layers; ``none`` for no skip connection.
        skip_init: value of a fixed λ, or initial value of a learned λ.
        gate: True to multiply the mixer's output by SiLU of a linear map of the mixer's input.
        dropout: dropout rate after the embeddings, each mixer and each feed-forward part.
        initializer_range: standard deviation of initial weights.
        use_cache: True to return the decoding cache in evaluation mode.
        pooling: vector that a sequence classifier reads: ``last`` (state of the last real token) or ``mean``
            (mean over real tokens); ``last`` by default if ``causal``, else ``mean``.
        image_size: side of an image in pixels, for image classifiers.
        patch_size: side of an image patch in pixels: 2, 4, 8 or 16.
        num_channels: number of color channels.
        class_attention_layers: number of layers after the blocks in which only the class token attends.
        tokens_norm: True if class-attention layers normalize all tokens, as released; False if only the class
            token.
        pad_token_id: token that pads short sequences.
        bos_token_id: token at the beginning of a text.
        eos_token_id: token at the end of a text.
        tie_word_embeddings: True if the output head shares weights with the embedding.
        **kwargs: arguments of `transformers.PreTrainedConfig`, such as ``num_labels``.

    Raises:
        InputError: if a value is out of range or unknown.

    Examples:
        >>> config = ToSTConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3,
        ...                     layer_types=["tssa", "softmax", "tssa"])
        >>> config.head_dim, config.intermediate_size, config.position_bias
        (16, 256, True)
    """

    model_type = "tost"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers reads a list)
    # config.json stores `layer_types` as `mixers`: a Trainer that resumes reads the file without this class,
    # and transformers rejects layer types that it does not know.
    attribute_map = {"layer_types": "mixers"}  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "gelu",
        max_position_embeddings: int = 1024,
        layer_types: Sequence[str] | str | None = None,
        mixer_options: dict[str, dict[str, Any]] | None = None,
        causal: bool = True,
        half_life: HalfLife | None = None,
        position_bias: bool | None = None,
        position_embeddings: str = "learned",
        norm: str = "layer",
        norm_position: str = "pre",
        norm_eps: float = 1e-5,
        use_bias: bool = True,
        layer_scale: float | None = None,
        skip: str = "fixed",
        skip_init: float = 1.0,
        gate: bool = False,
        dropout: float = 0.0,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        pooling: str | None = None,
        image_size: int = 224,
        patch_size: int = 16,
        num_channels: int = 3,
        class_attention_layers: int = 2,
        tokens_norm: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        in_file = kwargs.pop("mixers", "tssa")
        layer_types = in_file if layer_types is None else layer_types
        _check_keywords(kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.head_dim = head_dim_of("ToSTConfig", hidden_size, max(num_attention_heads, 1), head_dim)
        self.intermediate_size = intermediate_size if intermediate_size is not None else 4 * hidden_size
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.mixer_options = mixer_options or {}
        self.causal = causal
        self.half_life = None
        if half_life is not None:  # infinity becomes None, because JSON cannot store infinity
            lives = check_half_life("ToSTConfig", half_life, num_attention_heads, causal)
            self.half_life = [None if math.isinf(life) else life for life in lives]
        self.position_bias = causal and half_life is None if position_bias is None else position_bias
        self.position_embeddings = position_embeddings
        self.norm, self.norm_position, self.norm_eps = norm, norm_position, norm_eps
        self.use_bias = use_bias
        self.layer_scale = layer_scale
        self.skip, self.skip_init = skip, skip_init
        self.gate = gate
        self.dropout = dropout
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.pooling = pooling if pooling is not None else "last" if causal else "mean"
        self.image_size, self.patch_size, self.num_channels = image_size, patch_size, num_channels
        self.class_attention_layers = class_attention_layers
        self.tokens_norm = tokens_norm
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        # Set last, because `super().__init__` accepts only layer types of transformers.
        self.layer_types = (
            [layer_types] * num_hidden_layers if isinstance(layer_types, str) else list(layer_types)
        )
        self.validate()

    def validate(self) -> None:
        """Raise InputError if a value is invalid or unknown; transformers calls this method before saving."""
        for name in POSITIVE:
            whole_number(f"ToSTConfig `{name}`", getattr(self, name))
        for name in FLAGS:
            if isinstance(getattr(self, name), str):  # a string such as "false" would count as true
                _refuse(name, "true or false", repr(getattr(self, name)), "Leave the quotes out.")
        in_range("ToSTConfig `dropout`", self.dropout, "[0, 1]")
        for name in FINITE:
            if getattr(self, name) is not None:
                in_range(f"ToSTConfig `{name}`", getattr(self, name), "(-inf, inf)")
        for name, choices in CHOICES.items():
            one_of(f"ToSTConfig `{name}`", getattr(self, name), choices)
        one_of("ToSTConfig `hidden_act`", self.hidden_act, ACT2FN)
        for mixer, options in self.mixer_options.items():
            one_of("ToSTConfig `mixer_options`", mixer, {*MIXERS, *self.layer_types})
            if not isinstance(options, dict):
                fix = "Pass the arguments of the mixer by name."
                _refuse(f"mixer_options[{mixer!r}]", "a dict", repr(options), fix)
        try:
            json.dumps(self.mixer_options)
        except TypeError as error:  # without this check, a trained model could not be saved
            wanted = "numbers, names and lists, as config.json holds"
            _refuse("mixer_options", wanted, str(error), "Convert the value, as by `tolist()` or `int()`.")
        if len(self.layer_types) != self.num_hidden_layers:
            wanted = f"one name for each of {self.num_hidden_layers} layers"
            fix = "Pass as many names as num_hidden_layers, or one name for all."
            _refuse("layer_types", wanted, f"{len(self.layer_types)}", fix)
        if self.position_bias and not self.causal:
            _refuse("position_bias", "a causal model", "causal=False", "Leave position_bias out.")
        if self.half_life is not None:
            check_half_life("ToSTConfig", self.half_life, self.num_attention_heads, self.causal)


def _check_keywords(others: dict[str, Any]) -> None:
    """Raise InputError if an unknown argument resembles a field, which is probably a typo."""
    fields = [name for name in inspect.signature(ToSTConfig).parameters if name != "kwargs"]
    for name in others:
        similar = [] if hasattr(PreTrainedConfig, name) else get_close_matches(name, fields, n=1, cutoff=0.85)
        if similar:
            _refuse(name, "a known field", "an unknown one", f"Did you mean {similar[0]}?")


def _refuse(field: str, expected: str, got: str, fix: str) -> NoReturn:
    raise InputError(f"ToSTConfig `{field}`", expected=expected, got=got, fix=fix)
