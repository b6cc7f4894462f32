"""What a command feeds the model it is given: a text, pictures or a data set, as batches."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rankwise.auditing.text_inputs import ALL, Shard
from rankwise.cli.load_model import Subject
from rankwise.errors import InputError, first_line


@dataclass(frozen=True)
class Inputs:
    """Batches for a subject, and in words what they are."""

    batches: Iterable[Any]
    data: str
    notes: tuple[str, ...] = ()
    tokenizer: Any = None
    """What turned text into ids, where text is read."""


def inputs_for(
    subject: Subject,
    *,
    text: Path | None = None,
    images: Path | None = None,
    dataset: str | None = None,
    tokens: int = 256,
    sequences: int = 8,
    batch_size: int = 4,
    shard: Shard = ALL,
) -> Inputs:
    """Make batches of what the user points at, in the form the subject reads.

    Args:
        subject: the model.
        text: a text file, or ``.jsonl`` with one text a line.
        images: a folder of pictures, or a picture.
        dataset: ``NAME[:split:column]``.
        tokens: tokens of a sequence, cut to what the model can take.
        sequences: how many sequences at most.
        batch_size: sequences in a batch.
        shard: which of the sequences to take, where several processes share them.

    Raises:
        InputError: if nothing or too much is given, it cannot be read, or it is not what the model reads.
    """
    given = {"--text": text, "--images": images, "--dataset": dataset}
    chosen = [name for name, value in given.items() if value is not None]
    if not chosen and subject.batches is not None:
        mine = islice(subject.batches, shard.rank, None, shard.world)
        made = subject.batches if shard == ALL else mine
        return Inputs(made, f"batches of {subject.name}")
    if len(chosen) != 1:
        raise InputError(
            "data",
            expected="one of --text FILE, --images DIR, --dataset NAME[:split:column]",
            got=" and ".join(chosen) or "none",
            fix="The model reads pictures: give --images."
            if subject.reads == "pixel_values"
            else "Give --text FILE.",
        )
    if images is not None:
        return _pictures(subject, images, sequences, batch_size, shard)
    return _texts(subject, text, dataset, tokens, sequences, batch_size, shard)


def _pictures(subject: Subject, images: Path, sequences: int, batch_size: int, shard: Shard) -> Inputs:
    from rankwise.data import load_image_processor, read_images
    from rankwise.data.processors import plain_processor

    if subject.source and subject.reads == "input_ids":
        raise InputError(
            f"model {subject.name}",
            expected="a model that reads pictures",
            got="one that reads text",
            fix="Give --text.",
        )
    config = getattr(subject.model, "config", None)
    if subject.source:
        processor = load_image_processor(
            subject.source,
            config=config,
            revision=subject.revision or None,
            trust_remote_code=subject.trust_remote_code,
        )
    else:
        processor = plain_processor({"size": 224}, note="pictures resized to 224×224, mean and std 0.5")
    mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
    batches: Iterable[Any] = read_images(
        images, processor, sequences=sequences, batch_size=batch_size, mode=mode, shard=shard
    )
    if not subject.source:
        batches = (batch["pixel_values"] for batch in batches)
    note = getattr(processor, "note", "")
    return Inputs(batches, f"{images} (pictures)", (note,) if note else ())


def _texts(
    subject: Subject,
    path: Path | None,
    dataset: str | None,
    tokens: int,
    sequences: int,
    batch_size: int,
    shard: Shard,
) -> Inputs:
    from rankwise.auditing.text_inputs import longest_sequence, model_batches
    from rankwise.data import dataset_texts, load_text

    if subject.reads != "input_ids":
        raise InputError(
            f"model {subject.name}",
            expected="a model that reads token ids",
            got=f"one that reads {subject.reads}",
            fix="Give --images DIR."
            if subject.reads == "pixel_values"
            else "Use module.py:factory with batches.",
        )
    texts = load_text(path) if path is not None else dataset_texts(str(dataset))
    notes: list[str] = []
    if subject.source or subject.tokenizer:
        tokenizer = _tokenizer(subject)
    else:
        tokenizer = ByteTokenizer()
        notes.append("text read as bytes (ids 0 to 255): a factory's model has no tokenizer")
    model = subject.model
    limit = longest_sequence(model)
    shown = tokens if limit is None else min(tokens, limit)
    made, said = model_batches(
        model, texts, tokenizer, tokens=tokens, sequences=sequences, batch_size=batch_size, shard=shard
    )
    data = f"{path if path is not None else dataset}, up to {shown} tokens"
    return Inputs(made, data, (*notes, *said), tokenizer)


def _tokenizer(subject: Subject) -> Any:
    from transformers import AutoTokenizer

    home = subject.tokenizer or subject.source
    revision = "main" if subject.tokenizer else subject.revision or "main"
    try:
        return AutoTokenizer.from_pretrained(
            home, revision=revision, trust_remote_code=subject.trust_remote_code
        )
    except Exception as error:
        bare = Path(home).is_dir() and not any(_of_a_tokenizer(file.name) for file in Path(home).iterdir())
        raise InputError(
            f"tokenizer {home}" if subject.tokenizer else f"tokenizer of {subject.name}",
            expected="a folder with the files of a tokenizer, or a Hugging Face name",
            got=f"the folder {home} without one" if bare else f"{type(error).__name__}: {first_line(error)}",
            fix="Name another: --tokenizer FOLDER (or a Hugging Face name); or save it there: "
            "`tokenizer.save_pretrained(folder)`.",
        ) from error


def _of_a_tokenizer(file: str) -> bool:
    return any(part in file for part in ("tokenizer", "vocab", "merges", "spiece", "sentencepiece"))


class ByteTokenizer:
    """Text as its UTF-8 bytes, for models that bring no tokenizer."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        """The bytes of each text."""
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, ids: list[int]) -> str:
        """The text of some bytes; � where they are no whole characters.

        Args:
            ids: bytes.
        """
        return bytes(ids).decode(errors="replace")
