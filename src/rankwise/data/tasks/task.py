"""What every task is: examples to train on, examples to be tested on, and where they came from."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import Dataset, Subset

from rankwise.data.tasks.checks import need_whole
from rankwise.data.tasks.examples import IGNORED, Examples, Item, Windows, collate
from rankwise.errors import InputError

Kind = Literal["language", "sequence", "image"]
"""The head that a task asks for: ``AutoModelForCausalLM``, ``…ForSequenceClassification``,
``…ForImageClassification``."""


@dataclass(frozen=True)
class Provenance:
    """Where the examples of a task came from, enough to make them again.

    ``sha256`` is over the names, types, shapes and contents of all arrays, train before test: two tasks with
    the same one are the same to the byte.
    """

    name: str
    source: str
    seed: int | None
    train: int
    test: int
    sha256: str
    options: Mapping[str, Any] = field(default_factory=dict)
    validation: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return {**asdict(self), "options": dict(self.options)}


@dataclass(frozen=True)
class Task:
    """Examples to train on and to be tested on, with what a model has to know about them.

    ``vocab_size`` is None for pictures, ``num_labels`` for language modelling. ``length`` counts the tokens
    of the longest sequence, or the pixels of a picture. Labels of language tasks are not shifted: models of
    transformers shift them.
    """

    name: str
    kind: Kind
    train: Dataset[Item]
    test: Dataset[Item]
    length: int
    provenance: Provenance
    vocab_size: int | None = None
    num_labels: int | None = None
    image_shape: tuple[int, int, int] | None = None
    pad_token_id: int | None = None
    chance: float | None = None
    """Share right in the test split when every answer is the most common one of it; None where all tokens
    are to be predicted."""
    validation: Dataset[Item] | None = None
    bytes_per_token: float | None = None
    """UTF-8 bytes of the test text over its tokens: nats a token, divided by it, are nats a byte."""
    tokenizer: Any = None
    """Of transformers, where the ids are those of a given or trained one; it belongs beside the model."""

    def collate(self, items: Sequence[Item]) -> Item:
        """Make a batch (`rankwise.data.tasks.collate`), as ``data_collator`` of a Trainer.

        Args:
            items: of one of the splits.
        """
        return collate(items)

    def with_validation(self, examples: int, seed: int = 0) -> "Task":
        """Take examples out of the training split, to choose hyper-parameters and checkpoints by.

        Args:
            examples: how many, drawn at random.
            seed: of the draw.

        Returns:
            The same task with ``validation``, and a training split without it.

        Raises:
            InputError: if there are not more training examples than that, or they were taken out before.
        """
        if self.validation is not None:
            raise InputError(
                "`with_validation`",
                expected="a task without a validation split",
                got=f"{self.provenance.validation} examples taken out already",
                fix="Call it once, on the task as it was made.",
            )
        total = self.provenance.train
        need_whole("examples", examples, 1, total - 1)
        need_whole("seed", seed, 0)
        order = np.random.default_rng(seed).permutation(total).tolist()
        rest, taken = sorted(order[examples:]), sorted(order[:examples])
        options = {**self.provenance.options, "validation_seed": seed}
        record = replace(self.provenance, train=len(rest), validation=examples, options=options)
        return replace(
            self, train=Subset(self.train, rest), validation=Subset(self.train, taken), provenance=record
        )


def make_task(
    name: str,
    kind: Kind,
    train: Examples | Windows,
    test: Examples | Windows,
    *,
    length: int,
    source: str,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Task:
    """Put a task together with its record and its chance level.

    Args:
        name: of the task.
        kind: of head.
        train: examples to train on.
        test: examples to be tested on.
        length: tokens of the longest sequence.
        source: publication of the rule, file, or name on the Hub.
        seed: that decided what was drawn, or None.
        options: what else decided the contents.
        more: further fields of `Task`.
    """
    digest = hashlib.sha256()
    for part in (train, test):
        for key, array in part.arrays.items():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            digest.update(f"{key} {little.dtype.str} {little.shape};".encode())
            digest.update(np.ascontiguousarray(little).data)
    record = Provenance(name, source, seed, len(train), len(test), digest.hexdigest(), dict(options or {}))
    chance = _most_common(test.arrays["labels"]) if "labels" in test.arrays else None
    return Task(name, kind, train, test, length, record, chance=chance, **more)


def _most_common(labels: np.ndarray) -> float:
    answers = labels[labels != IGNORED]
    return float(np.unique(answers, return_counts=True)[1].max() / answers.size)


def accuracy(
    logits: Float[Tensor, "B C"] | Float[Tensor, "B T V"], labels: Int[Tensor, "B"] | Int[Tensor, "B T"]
) -> float:
    """Share of answers whose largest logit is at the label; NaN where no label counts.

    Range: [0, 1]; 1 = all right. Labels (B, T) are shifted as causal language models shift them: what the
    model says at t − 1 is held against the label at t. Labels of −100 are left out.

    Args:
        logits: of a classifier (B, C), or of a language model (B, T, V).
        labels: of the batch, as the task gives them.

    Examples:
        >>> import torch
        >>> accuracy(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1]))
        0.5
    """
    right, counted = answered(logits, labels)
    return right[counted].double().mean().item()


def answered(
    logits: Float[Tensor, "B C"] | Float[Tensor, "B T V"], labels: Int[Tensor, "B"] | Int[Tensor, "B T"]
) -> tuple[Bool[Tensor, "B *S"], Bool[Tensor, "B *S"]]:
    """Whether each largest logit is at its label, and whether that label counts, as `accuracy` shifts them.

    Args:
        logits: of a classifier (B, C), or of a language model (B, T, V).
        labels: of the batch, as the task gives them.
    """
    if labels.ndim == 2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.argmax(-1) == labels, labels != IGNORED
