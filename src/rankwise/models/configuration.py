"""What a model of ours is made of."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from rankwise.errors import InputError, did_you_mean
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
"""Fields that are one of a few words."""

FLAGS = ("causal", "position_bias", "use_bias", "gate", "use_cache", "tokens_norm", "tie_word_embeddings")
POSITIVE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "image_size",
            "num_channels", "max_position_embeddings")  # fmt: skip
"""Fields that are at least 1."""


HalfLife = int | float | Sequence[int | float | None] | None


class ToSTConfig(PreTrainedConfig):
    """Configuration of every model in `rankwise.models`: mixers by layer, and the block around them.

    The defaults are a language model of the released base size without LayerScale; `rankwise.models.preset`
    gives the released ones. What a mixer takes beyond the fields below goes into ``mixer_options``, such as
    ``{"tssa": {"conv_tokens": 4, "features": 16}}``.

    Source: Wu et al., "Token Statistics Transformer: Linear-Time Attention via Variational Rate Reduction",
    and the code released with it (frame and defaults); norm, skip and gate are options of our own.

    Args:
        vocab_size: tokens known.
        hidden_size: D, the model width.
        num_hidden_layers: L, the number of blocks.
        num_attention_heads: H, heads of every mixer.
        head_dim: K, width of a head; D / H where None.
        intermediate_size: width of the feed-forward part; 4 D where None, no such part where 0.
        hidden_act: its activation, by transformers' name.
        max_position_embeddings: tokens that learned positions are kept for.
        layer_types: the mixer of each layer, names of `rankwise.models.MIXERS`; one name stands for all;
            ``tssa`` where None.
        mixer_options: for each name in ``layer_types``, further arguments of that mixer.
        causal: whether a token sees only itself and earlier ones.
        membership: TSSA's Π: ``softmax`` over the heads, or ``uniform`` (1 / H).
        half_life: causal TSSA with decayed sums: one number of tokens for all heads, or one for each, where
            None is a head that forgets nothing; `rankwise.ops.half_lives` makes a ladder. None: no decay, as
            released.
        position_bias: causal TSSA's learned bias by position, as released; where None, it is kept unless
            the sums decay or memberships are uniform.
        position_embeddings: ``learned``, or ``none``: then length is unbounded.
        norm: ``layer``, ``rms`` or ``none``.
        norm_position: ``pre`` (on what a part reads) or ``post`` (on the sum).
        norm_eps: its ε.
        use_bias: biases in linear layers and norms.
        layer_scale: initial value of a learned scale by channel on what each part adds; None: no scale.
        skip: what the mixer's output is added to: λ x, with λ ``fixed``, ``learned`` for each layer, or for
            each ``channel`` of each layer, or once for all layers: ``shared``; or to nothing: ``none``.
        skip_init: λ, or what it is learned from.
        gate: multiply the mixer's output by SiLU of a linear map of its input.
        dropout: rate on embeddings and on what each part adds.
        initializer_range: standard deviation of weights at the start.
        use_cache: give back the decoding state in evaluation.
        pooling: token a sequence classifier reads: ``last`` real one, or the ``mean``; by ``causal`` where
            None.
        image_size: side of an image in pixels; images only.
        patch_size: side of a patch: 16 or 8, by that many halvings.
        num_channels: colours.
        class_attention_layers: layers in which the class token reads the patches.
        tokens_norm: the released class attention's norm on all tokens, not on the class token alone.
        pad_token_id: token that fills up short rows.
        bos_token_id: token a text starts with.
        eos_token_id: token a text ends with.
        tie_word_embeddings: whether the head shares the embedding's weights.
        **kwargs: what `transformers.PreTrainedConfig` takes, such as ``num_labels``.

    Raises:
        InputError: for a value that is out of range or unknown.

    Examples:
        >>> config = ToSTConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3,
        ...                     layer_types=["tssa", "softmax", "tssa"])
        >>> config.head_dim, config.intermediate_size, config.position_bias
        (16, 256, True)
    """

    model_type = "tost"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers reads a list)
    # In files the mixers stand under a name of their own: a Trainer that resumes reads config.json without
    # its class, and transformers refuses `layer_types` that are not its own layers.
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
        of_file = kwargs.pop("mixers", "tssa")
        layer_types = of_file if layer_types is None else layer_types
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
        literal = causal and half_life is None and membership == "softmax"
        self.position_bias = literal if position_bias is None else position_bias
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
        # Set last: transformers' own check, which runs above, knows the names of its own layers alone.
        names = [layer_types] * num_hidden_layers if isinstance(layer_types, str) else list(layer_types)
        self.layer_types = names
        self.validate()

    def validate(self) -> None:
        """Check every field; transformers calls this again before it saves.

        Raises:
            InputError: for a value that is out of range or unknown.
        """
        _check_sizes(self)
        _check_flags(self)
        _check_numbers(self)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                _refuse_name(name, f"one of {', '.join(choices)}", getattr(self, name), choices)
        if self.hidden_act not in ACT2FN:
            _refuse_name("hidden_act", "an activation of transformers", self.hidden_act, ACT2FN)
        for mixer in self.mixer_options:
            if mixer not in MIXERS and mixer not in self.layer_types:
                _refuse_name("mixer_options", "names of mixers", mixer, MIXERS)
        if len(self.layer_types) != self.num_hidden_layers:
            raise InputError(
                "ToSTConfig `layer_types`",
                expected=f"one name for each of {self.num_hidden_layers} layers",
                got=f"{len(self.layer_types)}",
                fix="Give as many names as num_hidden_layers, or one name for all.",
            )


def _as_list(half_life: HalfLife, heads: int) -> list[float | None] | None:
    """One for each head; what is infinite becomes None, since JSON knows no infinity."""
    if half_life is None:
        return None
    lives = [half_life] * heads if isinstance(half_life, int | float) else half_life
    given = isinstance(lives, Sequence) and not isinstance(lives, str)
    if not given or not all(life is None or isinstance(life, int | float) for life in lives):
        _refuse_half_life(heads, repr(half_life))
    return [None if life is None or math.isinf(life) else float(life) for life in lives]


def _refuse_half_life(heads: int, got: str) -> NoReturn:
    raise InputError(
        "ToSTConfig `half_life`",
        expected=f"a number of tokens above 0, or one for each of {heads} heads",
        got=got,
        fix="A ladder such as [4, 16, 64, 256] gives each head a time scale of its own.",
    )


def _refuse_name(field: str, wanted: str, got: str, known: Iterable[str]) -> NoReturn:
    fix = did_you_mean(str(got), known)
    raise InputError(f"ToSTConfig `{field}`", expected=wanted, got=repr(got), fix=fix)


def _check_keywords(others: Mapping[str, Any]) -> None:
    """Refuse what is nearly one of our fields; transformers has many more of its own, which pass."""
    ours = [name for name in inspect.signature(ToSTConfig).parameters if name != "kwargs"]
    for name in others:
        near = [] if hasattr(PreTrainedConfig, name) else get_close_matches(name, ours, n=1, cutoff=0.85)
        if near:
            raise InputError(
                f"ToSTConfig `{name}`",
                expected="a known field",
                got="an unknown one",
                fix=f"Did you mean {near[0]}?",
            )


def _check_flags(config: ToSTConfig) -> None:
    """Refuse words such as ``"false"``, which Python takes for true."""
    for name in FLAGS:
        value = getattr(config, name)
        if isinstance(value, str):
            raise InputError(
                f"ToSTConfig `{name}`", expected="true or false", got=repr(value), fix="Leave the quotes out."
            )


def _check_numbers(config: ToSTConfig) -> None:
    if not 0 <= config.dropout <= 1:
        _refuse_number("dropout", "a rate from 0 to 1", config.dropout)
    for name in ("layer_scale", "skip_init", "norm_eps", "initializer_range"):
        value = getattr(config, name)
        if value is not None and not math.isfinite(value):
            _refuse_number(name, "a finite number", value)


def _refuse_number(field: str, wanted: str, got: float) -> NoReturn:
    raise InputError(
        f"ToSTConfig `{field}`", expected=wanted, got=f"{got}", fix="Change it, or leave it out."
    )


def _check_sizes(config: ToSTConfig) -> None:
    for name in POSITIVE:
        if getattr(config, name) < 1:
            raise InputError(
                f"ToSTConfig `{name}`", expected="at least 1", got=f"{getattr(config, name)}", fix="Raise it."
            )
    if config.position_bias and not (config.causal and config.membership == "softmax"):
        raise InputError(
            "ToSTConfig `position_bias`",
            expected="a causal model with softmax memberships",
            got=f"causal={config.causal}, membership={config.membership!r}",
            fix="Leave position_bias out.",
        )
    if config.half_life is not None:
        _check_half_life(config, config.half_life)


def _check_half_life(config: ToSTConfig, lives: list[float | None]) -> None:
    if len(lives) != config.num_attention_heads or not all(life is None or life > 0 for life in lives):
        _refuse_half_life(config.num_attention_heads, f"{lives}")
    if not config.causal:
        raise InputError(
            "ToSTConfig `half_life`",
            expected="a causal model",
            got="causal=False",
            fix="Sums over all tokens do not decay: leave half_life out.",
        )
