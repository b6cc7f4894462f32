"""Inputs for a model of an unknown kind, guessed from the names of its arguments."""

import inspect
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from experiments.tiny_architectures import BATCH, DECODED, TOKENS, WIDTH

STATES = ("inputs_embeds", "hidden_states", "encoder_hidden_states")
PATCHES = 6
"""Patches of a picture on each side, where a model is given patches."""
WIDTHS = (
    re.compile(r"normalized_shape=\[(?P<wanted>\d+)\].*size\[.*\b(?P<got>\d+)\]"),
    re.compile(r"cannot be multiplied \(\d+x(?P<got>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"size of tensor a \((?P<got>\d+)\) must match the size of tensor b \((?P<wanted>\d+)\)"),
)
"""Errors about the width of an input, and the widths that they name."""


def fed(model: nn.Module) -> tuple[dict[str, Tensor], Exception | None]:
    """Inputs that a model of an unknown kind takes, and the first error if none was found.

    Its main input is tried alone, then with the arguments that it must have or that its errors name, then
    with all of which it is known what they may be; each in the shapes that its configuration suggests.
    """
    names = inspect.signature(model.forward).parameters
    torch.manual_seed(1)
    known = {name: made for name in names if (made := list(_inputs(name, model)))}
    main = getattr(model, "main_input_name", "input_ids")
    needed = {name for name in known if names[name].default is inspect.Parameter.empty}
    ready = {
        name for name in known if name not in ("inputs_embeds", "hidden_states", "encoder_hidden_states")
    }
    words = {"input_ids", "decoder_input_ids"} & set(known)
    waiting = [needed | ({main} & set(known)), words, words | {"pixel_values"} & ready, ready, set(known)]
    tried: list[set[str]] = []
    first: Exception | None = None
    while waiting:
        chosen = waiting.pop(0)
        if not chosen or chosen in tried or len(tried) > 5:
            continue
        tried.append(chosen)
        for batch in _shapes({name: known[name] for name in names if name in chosen}):
            error = _refusal(model, batch)
            for _ in range(2):  # the width that an error asks for, and that of another input
                batch, changed = _widened(batch, error)
                if not changed:
                    break
                error = _refusal(model, batch)
            if error is not None:
                first = first or error
                told = {name for name in known if re.search(rf"\b{name}\b", str(error))} - chosen
                if told:
                    waiting.insert(0, chosen | told)
            else:
                return batch, None
    return {}, first or RuntimeError("no input is known that it takes")


def _refusal(model: nn.Module, batch: dict[str, Tensor]) -> Exception | None:
    """The error of a model on a batch; None where it runs."""
    try:
        with torch.no_grad():
            model(**batch)
    except Exception as error:
        return error
    return None


def _widened(batch: dict[str, Tensor], error: Exception | None) -> tuple[dict[str, Tensor], bool]:
    """A batch with the width that an error asks for, where it names that of an input; and whether it does."""
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


def _shapes(options: dict[str, list[Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Every choice of shapes, the likeliest first, twenty at most."""
    picks = product(*(range(len(made)) for made in options.values()))
    for pick in sorted(picks, key=sum)[:20]:
        yield {name: made[at] for (name, made), at in zip(options.items(), pick, strict=True)}


def _inputs(name: str, model: nn.Module) -> Iterator[Tensor]:
    """Values that an argument of this name may take."""
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


def _places() -> Tensor:
    """Row and column of every patch of a picture."""
    return torch.cartesian_prod(torch.arange(PATCHES), torch.arange(PATCHES)).expand(BATCH, -1, -1)


PLAIN: dict[str, Callable[[], Tensor]] = {
    "merge_sizes": lambda: torch.tensor([1]),
    "pixel_position_ids": _places,
    "pixel_attention_mask": lambda: torch.ones(BATCH, PATCHES**2, dtype=torch.long),
    "spatial_shapes": lambda: torch.full((BATCH, 2), PATCHES),
    "timesteps": lambda: torch.arange(TOKENS).expand(BATCH, -1),
    "past_values_padding": lambda: torch.zeros(BATCH, 512, dtype=torch.long),
    "freq": lambda: torch.zeros(BATCH, 1, dtype=torch.long),
    "audio_mel_mask": lambda: torch.zeros(BATCH, 64, dtype=torch.bool),
}
"""Arguments whose values hang on no setting."""
FEATURES = {
    "visual_feats": ("visual_feat_dim", DECODED),
    "visual_pos": ("visual_pos_dim", DECODED),
    "states": ("state_dim", TOKENS),
    "actions": ("act_dim", TOKENS),
    "rewards": ("", TOKENS),
    "returns_to_go": ("", TOKENS),
    "audio_mel": ("input_feat_size", 64),
}
"""Arguments of vectors: the setting that holds their width (none: 1), and how many vectors."""


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
    """The first whole number of one of these names, here or in a part of the configuration."""
    from transformers import PreTrainedConfig

    for part in [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]:
        for name in names:
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return otherwise
