"""Any model type of transformers, tiny: sizes are shrunk by their names, inputs are found by trial."""

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, DECODED = 2, 32, 8
LARGEST = 40_000_000
"""Maximum number of parameters with its own widths; larger models exceed the time limit."""
WIDTH, HEADS, LAYERS, VOCABULARY = 32, 4, 2, 100

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SIZES = [(re.compile(pattern), value) for pattern, value in TABLES["sizes"].items()]
"""Upper limit of an integer by its name; the first pattern that matches decides."""
BY_LAYER = re.compile(r".*(layer_types|layers_block_type|block_types|layers_type|mlp_layer_types)$")
KEPT = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
LEFT_OUT = ("transformers_version", "architectures", "dtype", "per_layer_config")
LEFT_OUT += ("stage_names", "attention_layers")
OUTPUTS = ("out_features", "out_indices")
"""Stages that a backbone returns: left out at first, so that it returns the last."""
REQUIRED: dict[str, int] = TABLES["required"]
"""Settings that a model requires and its default configuration leaves open."""
BY_TYPE: dict[str, dict[str, Any]] = TABLES["by_type"]
"""Further settings by type: sizes that depend on each other, and settings left open."""


def small(settings: dict[str, Any], widths: bool = True, stages: bool = False) -> dict[str, Any]:
    """Return the settings of a configuration with every size made small.

    `widths`: widths and heads too, not only depths, vocabularies and experts. `stages`: backbones return all
    the stages that they returned before.
    """
    if settings.get("model_type") == "timm_backbone":  # it requires another library
        stages = [f"stage{at}" for at in settings.get("out_indices") or [4] if at > 0]
        return {"model_type": "resnet", "depths": [1, 1, 1, 1], "out_features": stages}
    made = {
        name: _small(name, value, settings, widths, stages)
        for name, value in settings.items()
        if name not in LEFT_OUT and (stages or name not in OUTPUTS) and not name.startswith("_")
    }
    if widths:
        made |= BY_TYPE.get(str(settings.get("model_type")), {})
    if "use_timm_backbone" in made:
        made["use_timm_backbone"] = False
    kinds = {
        name: list(dict.fromkeys(value))
        for name, value in settings.items()
        if BY_LAYER.match(name) and isinstance(value, list | tuple) and value and isinstance(value[0], str)
    }
    if kinds:
        depth = max(LAYERS, *(len(one) for one in kinds.values()))
        made |= {name: (one * depth)[:depth] for name, one in kinds.items()}
        made |= {name: depth for name in KEPT if name in made}
    depth = made.get("num_hidden_layers")
    for name, value in made.items():  # one entry per layer
        if isinstance(value, list) and isinstance(depth, int) and name not in kinds:
            made[name] = value[:depth] if len(value) == settings["num_hidden_layers"] else value
    return made


def _small(name: str, value: Any, settings: dict[str, Any], widths: bool, stages: bool) -> Any:
    if isinstance(value, dict):
        named = all(isinstance(key, str) for key in value)
        return small(value, widths, stages) if named else value
    if name == "default_language" and value is None:
        return next(iter(settings.get("languages") or [None]))
    if name in OUTPUTS:
        return value
    if name.endswith(("_token_id", "_token_index", "_token_ids", "_id")):
        return _token(name, value)
    if isinstance(value, bool) or value is None:
        return value if value is not None else REQUIRED.get(name)
    if name == "attention_types":  # GPT-Neo: kinds of layers, and their numbers
        return [[kinds, LAYERS // len(kinds)] for kinds, _ in value]
    if name.endswith("_in_channels") and isinstance(value, list) and widths:
        inner = settings.get("encoder_hidden_dim")  # width of the encoder; others are of a backbone
        return [WIDTH if one == inner else one for one in value] if len(set(value)) == 1 else value
    if isinstance(value, list | tuple) and value and all(isinstance(one, int) for one in value):
        return _small_list(name, list(value), widths)
    if not isinstance(value, int):
        return value
    if name == "image_size" and widths and isinstance(settings.get("patch_size"), int):
        return min(value, 4 * settings["patch_size"])
    if name in ("num_key_value_heads", "num_kv_heads") and value == settings.get("num_attention_heads"):
        return HEADS if widths else value
    if name in ("max_position_embeddings", "n_positions"):
        return min(value, 512)
    for pattern, target in SIZES:
        if pattern.fullmatch(name):
            free = widths or "layer" in name or "vocab" in name or "expert" in name
            return min(value, target) if free else value
    return value


def _small_list(name: str, value: list[int], widths: bool) -> list[int]:
    if name in ("depths", "blocks_per_stage", "layers", "num_block_repeats", "stage_num_blocks"):
        return [min(one, 1) for one in value]
    if name == "mrope_section" and widths:
        return [2, 1, 1][: len(value)]
    if name == "eos_token_id":
        return [min(one, 2) for one in value]
    if name == "intermediate_size":
        return [min(one, 48) for one in value]
    return value


def _token(name: str, value: Any) -> Any:
    """Return ids of special tokens inside the small vocabulary, all different."""
    if isinstance(value, list | tuple):
        return [_token(name, one) for one in value]
    if not isinstance(value, int) or value < VOCABULARY:
        return value
    common = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return common.get(name, 70 + sum(map(ord, name)) % 29)


def tiny_variants(model_type: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield models of a type: small; with its own widths and few layers; small with all stages."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    errors = []
    for size, widths, stages in (
        ("small", True, False),
        ("own widths, few layers", False, False),
        ("small, all stages", True, True),
    ):
        try:
            given = cls()
            open_ones = {name: None for name in REQUIRED if getattr(given, name, 0) is None}
            config = cls.from_dict(small(given.to_dict() | open_ones, widths, stages))
            if widths:
                _split_angles(config)
            for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
                if getattr(part, "use_cache", False):  # some caches require a layer of attention
                    part.use_cache = False
            if not widths:
                with torch.device("meta"):
                    count = transformers.AutoModel.from_config(config).num_parameters()
                if count > LARGEST:
                    raise ValueError(f"{count / 1e6:,.0f} million parameters with its own widths")
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(config)
        except Exception as error:
            errors.append(error)
            continue
        with torch.no_grad():  # tiny default weights make every attention uniform; widen them
            for parameter in model.parameters():
                if parameter.dim() >= 2 and parameter.is_floating_point():
                    parameter.normal_(0, max(1, parameter[0].numel()) ** -0.5)
        yield size, model.eval()
    if len(errors) == 3:
        raise errors[0]


def _split_angles(config: Any) -> None:
    """Split rotary angles of width 8 into three sections, if the model has sections for its own width."""
    import transformers

    parts = [config, getattr(config, "text_config", None)]
    models = [transformers.MODEL_MAPPING.get(type(part), None) for part in parts]
    modules = {inspect.getmodule(one[0] if isinstance(one, tuple) else one) for one in models if one}
    if any("mrope_section" in inspect.getsource(module) for module in modules if module):
        for part in parts:
            rope = getattr(part, "rope_parameters", None)
            if isinstance(rope, dict):
                half = int(4 * rope.get("partial_rotary_factor", 1.0))
                rope["mrope_section"] = [half - half // 2, half // 4, half // 2 - half // 4]


# --- inputs ---------------------------------------------------------------------------------------------

STATES = ("inputs_embeds", "hidden_states", "encoder_hidden_states")
PATCHES = 6
"""Patches per side of a picture, for models that read patches."""
WIDTHS = (
    re.compile(r"normalized_shape=\[(?P<wanted>\d+)\].*size\[.*\b(?P<got>\d+)\]"),
    re.compile(r"cannot be multiplied \(\d+x(?P<got>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"size of tensor a \((?P<got>\d+)\) must match the size of tensor b \((?P<wanted>\d+)\)"),
)
"""Errors about the width of an input; the widths that they name."""


def find_inputs(model: nn.Module) -> tuple[dict[str, Tensor], Exception | None]:
    """Return inputs that a model accepts, and the first error if none were found.

    Its main input is tried alone, then with required arguments and arguments that its errors name, then
    with all arguments of known names; each in the shapes that its configuration suggests.
    """
    names = inspect.signature(model.forward).parameters
    torch.manual_seed(1)
    known = {name: made for name in names if (made := list(_inputs(name, model)))}
    main = getattr(model, "main_input_name", "input_ids")
    needed = {name for name in known if names[name].default is inspect.Parameter.empty}
    ready = set(known) - set(STATES)
    words = {"input_ids", "decoder_input_ids"} & set(known)
    waiting = [needed | ({main} & set(known)), words, words | {"pixel_values"} & ready, ready, set(known)]
    tried: list[set[str]] = []
    first: Exception | None = None
    while waiting:
        chosen = waiting.pop(0)
        if not chosen or chosen in tried or len(tried) > 5:
            continue
        tried.append(chosen)
        options = {name: known[name] for name in names if name in chosen}
        picks = product(*(range(len(made)) for made in options.values()))
        for pick in sorted(picks, key=sum)[:20]:  # the likeliest shapes first
            batch = {name: made[at] for (name, made), at in zip(options.items(), pick, strict=True)}
            error = _refusal(model, batch)
            for _ in range(2):  # the widths of two inputs
                batch, changed = _widened(batch, error)
                if not changed:
                    break
                error = _refusal(model, batch)
            if error is not None:
                first = first or error
                named = {name for name in known if re.search(rf"\b{name}\b", str(error))} - chosen
                if named:
                    waiting.insert(0, chosen | named)
            else:
                return batch, None
    return {}, first or RuntimeError("no known input is accepted")


def _refusal(model: nn.Module, batch: dict[str, Tensor]) -> Exception | None:
    """Return the error of a model on a batch; None if it runs."""
    try:
        with torch.no_grad():
            model(**batch)
    except Exception as error:
        return error
    return None


def _widened(batch: dict[str, Tensor], error: Exception | None) -> tuple[dict[str, Tensor], bool]:
    """Return a batch with the width that an error requires, and if the error names the width of an input."""
    found = next(filter(None, (pattern.search(str(error)) for pattern in WIDTHS)), None)
    if found is None:
        return batch, False
    got, wanted = int(found["got"]), int(found["wanted"])
    changed = {
        name: torch.randn(*value.shape[:-1], wanted)
        for name, value in batch.items()
        if value.is_floating_point() and 2 <= value.dim() <= 3 and value.shape[-1] == got
    }
    return batch | changed, bool(changed)


def _inputs(name: str, model: nn.Module) -> Iterator[Tensor]:
    """Yield possible values of an argument."""
    config, arguments = model.config, inspect.signature(model.forward).parameters
    needed = {one for one, about in arguments.items() if about.default is inspect.Parameter.empty}
    takes_grid = "grid_thw" in arguments or "image_grid_thw" in needed
    side, times = _setting(config, ("patch_size",), 14), _setting(config, ("temporal_patch_size",), 1)
    channels = _setting(config, ("in_channels", "in_chans", "num_channels"), 3)
    width = _setting(config, ("hidden_size", "d_model", "embed_dim", "n_embd"), WIDTH)
    if name == "input_ids":
        yield torch.randint(5, min(60, _setting(config, ("vocab_size",), 60)), (BATCH, TOKENS))
        books = _setting(config, ("num_codebooks", "n_codebooks", "num_quantizers"), 0)
        if books:
            yield torch.randint(5, 60, (BATCH, TOKENS, books))
        yield torch.randint(5, 60, (BATCH, 256))
    elif name in ("decoder_input_ids", "qformer_input_ids"):
        yield torch.randint(5, 60, (BATCH, DECODED))
    elif name == "grid_thw" or (name == "image_grid_thw" and takes_grid):
        yield torch.tensor([[1, 4, 4]])
    elif takes_grid and name in ("hidden_states", "pixel_values"):
        yield torch.randn(16, channels * times * side**2)
        yield torch.randn(16, channels, side, side)
        merged = side * _setting(config, ("spatial_merge_size",), 1)
        yield torch.randn(16, merged, merged, channels)
    elif name == "pixel_values" and {"pixel_position_ids", "spatial_shapes"} & set(arguments):
        yield torch.randn(BATCH, PATCHES**2, channels * side**2)
    elif name in (*STATES, "x", "query_embeds", "inputs"):
        yield torch.randn(BATCH, TOKENS, width)
    elif name in ("pixel_values", "pixel_values_videos", "images"):
        yield from _pictures(config)
    elif name in ("input_features", "audio_features"):
        mel = _setting(config, ("num_mel_bins", "feature_size", "input_feat_per_channel"), 80)
        long = 2 * _setting(config, ("max_source_positions",), 50)
        yield torch.randn(BATCH, mel, long)
        yield torch.randn(BATCH, long, mel)
        yield torch.randn(BATCH, 1024, mel)
        yield torch.randn(BATCH, 1, 1001, mel)
    elif name in ("input_values", "audio_values", "audio"):
        yield torch.randn(BATCH, 8000)
        yield torch.randn(BATCH, 1, 8000)
        yield torch.randn(BATCH, 1024, _setting(config, ("num_mel_bins",), 128))
    elif name in ("input_features_mask", "feature_attention_mask"):
        yield torch.ones(BATCH, 2 * _setting(config, ("max_source_positions",), 50), dtype=torch.long)
    elif name in PLAIN:
        yield PLAIN[name]()
    elif name in FEATURES:
        setting, tokens = FEATURES[name]
        yield torch.randn(BATCH, tokens, _setting(config, (setting,), 1))
    elif name == "bbox":
        yield torch.randint(0, 50, (BATCH, TOKENS, 1)).expand(-1, -1, 4)
    elif name in ("past_values", "past_observed_mask", "past_time_features"):
        yield from _series(name, config)
    elif name in ("future_values", "future_time_features"):
        length = _setting(config, ("prediction_length",), DECODED)
        features = getattr(config, "num_time_features", 1)
        yield torch.randn((BATCH, length, features) if "time" in name else (BATCH, length))


PLAIN: dict[str, Callable[[], Tensor]] = {
    "merge_sizes": lambda: torch.tensor([1]),
    "pixel_position_ids": lambda: torch.cartesian_prod(*[torch.arange(PATCHES)] * 2).expand(BATCH, -1, -1),
    "pixel_attention_mask": lambda: torch.ones(BATCH, PATCHES**2, dtype=torch.long),
    "spatial_shapes": lambda: torch.full((BATCH, 2), PATCHES),
    "timesteps": lambda: torch.arange(TOKENS).expand(BATCH, -1),
    "past_values_padding": lambda: torch.zeros(BATCH, 512, dtype=torch.long),
    "freq": lambda: torch.zeros(BATCH, 1, dtype=torch.long),
    "audio_mel_mask": lambda: torch.zeros(BATCH, 64, dtype=torch.bool),
}
"""Arguments with values that do not depend on settings."""
FEATURES: dict[str, list[Any]] = TABLES["features"]
"""Arguments of vectors: the setting with their width (none: 1), and the number of vectors."""


def _pictures(config: Any) -> Iterator[Tensor]:
    channels = _setting(config, ("num_channels", "in_channels", "in_chans"), 3)
    side = _setting(config, ("image_size", "input_size"), 64)
    if isinstance(size := getattr(config, "image_size", None), list | tuple) and len(set(size)) == 2:
        yield torch.randn(BATCH, channels, *size)
    frames = _setting(config, ("num_frames", "frames_per_clip"), 2)
    for pixels in dict.fromkeys((min(side, 64), side)):
        yield torch.randn(BATCH, channels, pixels, pixels)
    for pixels in dict.fromkeys((min(side, 64), side)):
        yield torch.randn(BATCH, frames, channels, pixels, pixels)


def _series(name: str, config: Any) -> Iterator[Tensor]:
    length = _setting(config, ("context_length",), 32)
    lags = getattr(config, "lags_sequence", None) or [0]
    channels = _setting(config, ("num_input_channels", "input_size"), 1)
    if name == "past_time_features":
        yield torch.randn(BATCH, length + max(lags), config.num_time_features)
        return
    for shape in ((BATCH, length + max(lags)), (BATCH, length, channels)):
        yield torch.ones(shape) if name == "past_observed_mask" else torch.randn(shape)


def _setting(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    """Return the first positive integer of one of these names, in a configuration or its parts."""
    from transformers import PreTrainedConfig

    for part in [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]:
        for name in names:
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return otherwise
