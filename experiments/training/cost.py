"""Estimate of what a training requires on a GPU, from its configuration alone; not measured on a GPU."""

from collections.abc import Collection

from experiments.training.config import TrainingConfig

SPEED = 1e13
"""Assumed FLOP per second of one GPU in float32; data sheets promise two to seven times as many."""
START = 0.002
"""Assumed seconds per layer and step that starting its kernels takes, however small they are."""
KEPT = {
    "transformer": 23, "linear": 28, "mamba2": 31, "tost-scan": 33, "tost-scan-hybrid": 27, "s4d": 55,
    "mamba": 125,
}  # fmt: skip
"""Numbers that a layer keeps for its derivative, per token and unit of width."""
KEPT_BY_OTHERS = 18
"""The same for attention and TSSA in the frame of `rankwise.models`."""
BYTES = 259
"""Entries of the vocabulary, if the task does not say."""
LARGEST_GPU = 141
"""Memory of an H200, in GiB."""


def gpu_hours(config: TrainingConfig) -> float:
    """Estimate the hours on one GPU.

    Formula: (6 P + 12 D T per layer of softmax attention) FLOP per token, forward and backward, for P weights
    (12 D² per layer if the configuration does not say), width D and T tokens; at least `START`. Scans are not
    counted, which take up to half as much again. Source: Chowdhery et al., “PaLM”, 2022, appendix B.
    """
    attention = 12 * softmax_layers(config) * config.width * config.tokens
    step = (6 * weights_of(config) + attention) * config.batch * config.tokens / SPEED
    return config.steps * max(step, config.layers * START) / 3600


def gpu_gib(config: TrainingConfig) -> float:
    """Estimate the GiB of GPU memory in float32.

    Sum of weights, gradients and both moments of AdamW (16 P bytes), of what layers keep (`KEPT`), of logits
    with their derivative, and of a T × T matrix per head where PyTorch's fused attention does not accept the
    head width, which must be a multiple of 4.
    """
    kept = config.layers * KEPT.get(config.model, KEPT_BY_OTHERS) * config.width
    kept += 3 * config.task_options.get("vocab_size", BYTES)
    if head_width(config) % 4:
        kept += softmax_layers(config) * config.heads * config.tokens
    return (16 * weights_of(config) + 4 * config.batch * config.tokens * kept) / 2**30


def needs(configs: Collection[TrainingConfig]) -> str:
    """Return the estimates in words, from the smallest to the largest."""
    parts = []
    for unit, estimate in (("hours", gpu_hours), ("GiB", gpu_gib)):
        numbers = [f"{number:,.1f}" for number in sorted(map(estimate, configs))]
        parts.append(f"{' to '.join(dict.fromkeys((numbers[0], numbers[-1])))} {unit}")
    too_large = any(gpu_gib(config) > LARGEST_GPU for config in configs)
    more = f"; above {LARGEST_GPU} GiB: more than one GPU, and `run` uses one" if too_large else ""
    return f"about {' and '.join(parts)} on one GPU per seed{more}"


def softmax_layers(config: TrainingConfig) -> int:
    """Return the number of layers whose time grows as T²."""
    if config.model.endswith("hybrid"):
        return config.layers // 4
    return config.layers if config.model in ("transformer", "softmax", "softmax-rotary") else 0


def head_width(config: TrainingConfig) -> int:
    """Return the width of queries and keys of a head."""
    options = config.model_options.get("mixer_options", {}).get("softmax", {})
    width: int = options.get("query_dim", config.width // config.heads)
    return width


def weights_of(config: TrainingConfig) -> int:
    """Return the number of weights, without embeddings if the configuration does not name it."""
    return config.parameters or 12 * config.layers * config.width**2
