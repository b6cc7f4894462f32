"""Configuration of every model in `rankwise.models`."""

import inspect
import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from rankwise.errors import InputError, in_range, one_of, whole_number
from rankwise.models.mixers import MIXERS
from rankwise.models.mixers.mixer import head_dim_of

CHOICES = {
    "norm": ("layer", "rms", "none"),
    "norm_position": ("pre", "post"),
    "skip": ("none", "fixed", "learned", "channel", "shared"),
    "membership": ("softmax", "uniform"),
    "position_embeddings": ("learned", "none"),
    "pooling": ("last", "mean"),
}
"""Fields with a few possible values."""
FLAGS = ("causal", "position_bias", "use_bias", "gate", "use_cache", "tokens_norm", "tie_word_embeddings")
POSITIVE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "image_size",
            "num_channels", "max_position_embeddings")  # fmt: skip
"""Fields that are at least 1."""
FINITE = ("layer_scale", "skip_init", "norm_eps", "initializer_range")

HalfLife = int | float | Sequence[int | float | None] | None


class ToSTConfig(PreTrainedConfig):
    """Configuration of every model in `rankwise.models`: the mixer of each layer, and the block around it.

    The defaults are a language model of the released base size without LayerScale; `rankwise.models.preset`
    returns the released configurations. Options of a mixer that are not fields go into ``mixer_options``,
    such as ``{"tssa": {"conv_tokens": 4, "features": 16}}``.

    Source: Wu et al., "Token Statistics Transformer: Linear-Time Attention via Variational Rate Reduction",
    and the code released with it. Norm, skip and gate are options of this package.

    Args:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: D, the model width.
        num_hidden_layers: L, the number of blocks.
        num_attention_heads: H, heads of every mixer.
        head_dim: K, width of a head; D / H by default.
        intermediate_size: width of the feed-forward part; 4 D by default, 0 for no such part.
        hidden_act: activation of the feed-forward part, by transformers' name.
        max_position_embeddings: number of tokens with learned positions.
        layer_types: mixer of each layer, names of `rankwise.models.MIXERS`; one name applies to all layers;
            ``tssa`` by default.
        mixer_options: further arguments of the mixers, by names in ``layer_types``.
        causal: each token reads only itself and earlier tokens.
        membership: TSSA's Π: ``softmax`` over the heads, or ``uniform`` (1 / H).
        half_life: causal TSSA with decayed sums: number of tokens after which a token counts half, for all
            heads or per head, None for a head without decay; `rankwise.ops.half_lives` makes a ladder. None
            for no decay, as released.
        position_bias: causal TSSA's learned bias by position, as released; present by default unless the
            sums decay or memberships are uniform.
        position_embeddings: ``learned``, or ``none`` for no bound on the length.
        norm: ``layer``, ``rms`` or ``none``.
        norm_position: ``pre`` (on the input of a part) or ``post`` (on the sum).
        norm_eps: ε of the norms.
        use_bias: biases in linear layers and norms.
        layer_scale: initial value of a learned scale per channel on the update of each part; None for no
            scale.
        skip: λ of the skip λ x around the mixer: ``fixed``, ``learned`` per layer, per ``channel`` of each
            layer, or ``shared`` by all layers; ``none`` for no skip.
        skip_init: λ, or its initial value.
        gate: multiply the mixer's output by SiLU of a linear map of its input.
        dropout: dropout rate of embeddings and of the update of each part.
        initializer_range: standard deviation of initial weights.
        use_cache: return the decoding state in evaluation.
        pooling: token that a sequence classifier reads: ``last`` real one, or the ``mean``; by default
            ``last`` if ``causal``.
        image_size: side of an image in pixels; images only.
        patch_size: side of a patch: 2, 4, 8 or 16.
        num_channels: color channels.
        class_attention_layers: number of layers in which the class token reads the patches.
        tokens_norm: class attention norms all tokens, as released, not only the class token.
        pad_token_id: token that pads short rows.
        bos_token_id: token at the beginning of a text.
        eos_token_id: token at the end of a text.
        tie_word_embeddings: head and embedding share their weights.
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
    # Files call the mixers `mixers`: a Trainer that resumes reads config.json without this class, and
    # transformers refuses `layer_types` that are not its own layers.
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
        membership: str = "softmax",
        half_life: HalfLife = None,
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
        self.membership = membership
        self.half_life = _as_list(half_life, num_attention_heads)
        as_released = causal and half_life is None and membership == "softmax"
        self.position_bias = as_released if position_bias is None else position_bias
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
        # Set last: transformers' own check, which runs above, knows only the names of its own layers.
        self.layer_types = (
            [layer_types] * num_hidden_layers if isinstance(layer_types, str) else list(layer_types)
        )
        self.validate()

    def validate(self) -> None:
        """Raise for a value that is out of range or unknown; transformers calls this again before saving."""
        for name in POSITIVE:
            whole_number(f"ToSTConfig `{name}`", getattr(self, name))
        for name in FLAGS:
            if isinstance(getattr(self, name), str):  # Python takes "false" for true.
                _refuse(name, "true or false", repr(getattr(self, name)), "Leave the quotes out.")
        in_range("ToSTConfig `dropout`", self.dropout, "[0, 1]")
        for name in FINITE:
            if getattr(self, name) is not None:
                in_range(f"ToSTConfig `{name}`", getattr(self, name), "(-inf, inf)")
        for name, choices in CHOICES.items():
            one_of(f"ToSTConfig `{name}`", getattr(self, name), choices)
        one_of("ToSTConfig `hidden_act`", self.hidden_act, ACT2FN)
        for mixer in self.mixer_options:
            one_of("ToSTConfig `mixer_options`", mixer, {*MIXERS, *self.layer_types})
        if len(self.layer_types) != self.num_hidden_layers:
            wanted = f"one name for each of {self.num_hidden_layers} layers"
            fix = "Pass as many names as num_hidden_layers, or one name for all."
            _refuse("layer_types", wanted, f"{len(self.layer_types)}", fix)
        if self.position_bias and not (self.causal and self.membership == "softmax"):
            got = f"causal={self.causal}, membership={self.membership!r}"
            wanted = "a causal model with softmax memberships"
            _refuse("position_bias", wanted, got, "Leave position_bias out.")
        if self.half_life is not None:
            heads, lives = self.num_attention_heads, self.half_life
            if len(lives) != heads or not all(life is None or life > 0 for life in lives):
                _refuse_half_life(heads, f"{lives}")
            if not self.causal:
                fix = "Sums over all tokens do not decay: leave half_life out."
                _refuse("half_life", "a causal model", "causal=False", fix)


def _as_list(half_life: HalfLife, heads: int) -> list[float | None] | None:
    """Return one half-life per head, None for infinity, which JSON does not have."""
    if half_life is None:
        return None
    lives = [half_life] * heads if isinstance(half_life, int | float) else half_life
    listed = isinstance(lives, Sequence) and not isinstance(lives, str)
    if not listed or not all(life is None or isinstance(life, int | float) for life in lives):
        _refuse_half_life(heads, repr(half_life))
    return [None if life is None or math.isinf(life) else float(life) for life in lives]


def _check_keywords(others: dict[str, Any]) -> None:
    """Raise for names that are similar to a field; transformers has many more of its own, which pass."""
    fields = [name for name in inspect.signature(ToSTConfig).parameters if name != "kwargs"]
    for name in others:
        similar = [] if hasattr(PreTrainedConfig, name) else get_close_matches(name, fields, n=1, cutoff=0.85)
        if similar:
            _refuse(name, "a known field", "an unknown one", f"Did you mean {similar[0]}?")


def _refuse_half_life(heads: int, got: str) -> NoReturn:
    wanted = f"a number of tokens above 0, or one for each of {heads} heads"
    _refuse("half_life", wanted, got, "A ladder such as [4, 16, 64, 256] gives each head its own time scale.")


def _refuse(field: str, expected: str, got: str, fix: str) -> NoReturn:
    raise InputError(f"ToSTConfig `{field}`", expected=expected, got=got, fix=fix)
