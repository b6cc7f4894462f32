"""A recipe's configuration: everything that decides a training run, typed and checked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticKnownError

Size = Literal["small", "paper"]
"""``small``: minutes on a CPU core, ``paper``: the published setting, or near it, on a GPU."""


class Settings(BaseModel):
    """Base of all parts: no unknown fields, finite numbers, never changed in place."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, field: Any) -> Any:
        return no_boolean(value, cls.model_fields[field.field_name or ""].annotation)


def no_boolean(value: Any, kind: Any) -> Any:
    """Refuse true and false where a number is wanted, which pydantic takes for 1 and 0.

    Args:
        value: what was given.
        kind: annotation of what it is for.

    Raises:
        PydanticKnownError: in a validator, pydantic's own for another type.
    """
    kinds = {kind, *get_args(kind)}
    if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
        raise PydanticKnownError("int_type" if int in kinds else "float_type")
    return value


def unit_scale(width: int) -> float:
    """Standard deviation of initial weights at which queries and keys of normed tokens have variance 1.

    Formula: width^−1/2. At 0.02, the usual value for widths near 1,000, attention of narrow models begins
    nearly uniform, of rank 1, and they learn more slowly.

    Args:
        width: of the model.

    Examples:
        >>> unit_scale(64)
        0.125
    """
    return width**-0.5


class ModelSettings(Settings):
    """Which model is trained: one of `rankwise.train.models.MODELS`, and its sizes."""

    name: str
    width: int = Field(default=128, ge=1)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    feed_forward: int | None = Field(default=None, ge=0)
    """Width of the feed-forward part; by the model's own rule where None, and see ``parameters``."""
    parameters: int | None = Field(default=None, ge=1)
    """Weights the model is to have: the feed-forward width that comes nearest is chosen."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the model's Hugging Face configuration."""


class TaskSettings(Settings):
    """What is learned: one of `rankwise.train.tasks.TASKS`."""

    name: str
    tokens: int = Field(default=256, ge=2)
    """Length of a training sequence."""
    path: str | None = None
    """Where the data lie, for a task that reads files."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What else the task takes."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimiserSettings(Settings):
    """How weights are changed."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon``: torch's Muon for the matrices of linear layers, AdamW for all else, at one learning rate."""
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Of weights of linear layers, convolutions and embeddings; λ, norms and biases have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    warmup: int = Field(default=50, ge=0)
    """Steps in which the learning rate grows from 0."""
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient; a larger one is scaled down to it."""


class EvaluationSettings(Settings):
    """When and by what the model is judged."""

    every: int = Field(default=200, ge=1)
    """Steps between two evaluations; each is followed by a checkpoint."""
    examples: int | None = Field(default=None, ge=1)
    """How many examples of the validation part at most; all where None."""
    metric: Literal["loss", "accuracy"] = "loss"
    """What decides which checkpoint is the best."""


class EarlyLoss(Settings):
    """What kept runs show at an early step: mean training loss since the log before it."""

    step: int = Field(ge=1)
    loss: float
    tolerance: float = Field(gt=0)


def _several(codes: Any) -> Any:
    return (codes,) if isinstance(codes, str) else codes


class Recipe(Settings):
    """All that decides a run.

    Two runs of one recipe on one machine with one number of threads give the same weights to the bit.

    Examples:
        >>> from rankwise.train import recipe
        >>> recipe("language", seed=1).seed
        1
    """

    name: str
    size: Size = "small"
    claim: str
    """What the recipe is there to test, and where that is claimed."""
    variant: Mapping[str, Any] = Field(default_factory=dict)
    """The arguments of the recipe beside size and seed: which row of its experiment this is."""
    model: ModelSettings
    task: TaskSettings
    optimiser: OptimiserSettings = OptimiserSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    steps: int = Field(default=600, ge=1)
    batch: int = Field(default=8, ge=1)
    """Sequences in a step, over all processes; a process takes one device."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast; weights and optimiser stay float32."""
    log_every: int = Field(default=20, ge=1)
    monitor: bool = False
    """Whether a `rankwise.RankMonitor` audits a probe while the model trains; so with ``monitor_stop_on``."""
    monitor_every: int = Field(default=200, ge=1)
    monitor_tokens: int = Field(default=128, ge=2)
    """Tokens that the sequences of the probe are cut to: exact ranks cost O(T³)."""
    monitor_stop_on: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    """Codes of findings that end the training, such as COLLAPSE; a single code needs no list."""
    early: tuple[EarlyLoss, ...] = ()
    """Numbers of kept runs; they hold for the recipe as it is, and are left out where it is changed."""
    early_data: str | None = None
    """SHA-256 of the data that ``early`` was measured on; other data have other losses. None: any."""
    when_early_fails: Literal["warn", "stop"] = "warn"
    """What follows from a loss far from ``early``, or above `rankwise.train.health.worst_healthy_loss`."""
