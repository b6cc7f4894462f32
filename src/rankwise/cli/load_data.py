"""Load data that a command names (text, images or a data set) as batches for a loaded model."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer

from rankwise._internals.batches import batch_size, map_tensors
from rankwise._internals.forward import config_value
from rankwise.auditing.batches import ALL, Shard, evenly, longest_sequence, model_batches
from rankwise.cli.load_gguf import gguf_location, read_once
from rankwise.cli.load_images import find_images, load_image_processor, plain_processor, read_images
from rankwise.cli.load_model import LoadedModel, split_factory
from rankwise.errors import InputError, did_you_mean, first_line, need_package, readable_file

READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Endings of data files, and the reader of `datasets` for each ending."""
TOKENIZER_FILE = re.compile(r"tok|vocab|merges|spiece|sentencepiece|spm|bpe|tekken|dict")
"""Words in names of tokenizer files: each file that a tokenizer of transformers reads has one of them."""


@dataclass(frozen=True)
class LoadedData:
    """Batches for a model, with a description and notes that reports show."""

    batches: Iterable[Any]
    data: str
    notes: tuple[str, ...] = ()
    tokenizer: Any = None


def check_data(
    models: Sequence[str], context: typer.Context | None = None, **given: Path | str | None
) -> None:
    """Raise `InputError` unless exactly one option names data, and the data can be read.

    Factories need no option, because they can return batches; sizes of data are then refused. Arguments have
    the names of the options. A pipe is not read here, because it can be read once.
    """
    options = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    named = [option for option, value in options.items() if value is not None]
    if len(named) > 1 or (not named and any(not split_factory(model)[0] for model in models)):
        expected, got = f"one of {', '.join(options)}", " and ".join(named) or "none"
        fix = "Run the command once for each." if named else f"Pass one, such as {next(iter(options))} FILE."
        raise InputError("data", expected=expected, got=got, fix=fix)
    for name in ("sequences", "tokens", "batch_size") if not named else ():
        source = context and context.get_parameter_source(name)
        if context and source and source.name == "COMMANDLINE":
            expected, got = f"no such option for the batches of {models[0]}", str(context.params[name])
            fix = "Leave it out, and let the function return the batches that you want."
            raise InputError(f"--{name.replace('_', '-')}", expected=expected, got=got, fix=fix)
    checks: dict[str, Callable[[str], object]] = {"--images": find_images, "--dataset": _check_dataset}
    for option in named:
        if not Path(str(options[option])).is_fifo():
            checks.get(option, load_text)(str(options[option]))


def load_data(
    loaded: LoadedModel,
    *,
    text: Path | None = None,
    images: Path | None = None,
    dataset: str | None = None,
    tokens: int = 256,
    sequences: int = 8,
    batch_size: int = 4,
    shard: Shard = ALL,
    half: Literal[0, 1] | None = None,
) -> LoadedData:
    """Return batches of a text, of images or of a data set, or the batches that a factory returned.

    With `half`, read only the first or second half of one text, or every second of many texts.
    Raise `InputError` if the model cannot read the data.
    """
    reads = loaded.input_name
    fix = "Pass --text FILE to a language model, --images DIR to a vision model, or return batches."
    if text is None and images is None and dataset is None:
        if loaded.batches is None:
            expected, got = "data, or a factory that returns batches", "neither"
            raise InputError(f"model {loaded.name}", expected=expected, got=got, fix=fix)
        dealt = islice(loaded.batches, shard.number, None, shard.total)
        return LoadedData(loaded.batches if shard == ALL else dealt, f"batches of {loaded.name}")
    sizes: dict[str, Any] = {"sequences": sequences, "batch_size": batch_size, "shard": shard}
    if (reads == "input_ids" and bool(loaded.source)) if images is not None else reads != "input_ids":
        expected = f"a model that reads {'token ids' if images is None else 'images'}"
        raise InputError(f"model {loaded.name}", expected=expected, got=f"one that reads {reads}", fix=fix)
    if images is not None:
        return _load_images(loaded, images, **sizes)
    texts = load_text(text) if text is not None else dataset_texts(str(dataset))
    if half is not None and isinstance(texts, str):
        middle = len(texts) // 2
        texts = texts[middle:] if half else texts[:middle]
    elif half is not None:
        if len(texts) < 2:
            expected = "at least two texts, because every second text is held out"
            raise InputError(str(text or dataset), expected=expected, got=f"{len(texts)}", fix="Add texts.")
        texts = texts[half::2]
    return _load_texts(loaded, texts, str(text or dataset), tokens, **sizes)


def _load_images(loaded: LoadedModel, images: Path, **sizes: Any) -> LoadedData:
    config = getattr(loaded.model, "config", None)
    mode = "L" if config_value(config, "num_channels") == 1 else "RGB"
    if loaded.source:
        processor, note = load_image_processor(
            loaded.source, config=config, revision=loaded.revision or None,
            trust_remote_code=loaded.trust_remote_code,
        )  # fmt: skip
    else:
        note, processor = "images resized to 224×224, mean and std 0.5", plain_processor({}, len(mode))
    batches = read_images(images, processor, mode=mode, **sizes)
    pixels = batches if loaded.source else (batch["pixel_values"] for batch in batches)
    return LoadedData(pixels, f"{images} (images)", (note,) if note else ())


def _load_texts(
    loaded: LoadedModel, texts: str | list[str], name: str, tokens: int, **sizes: Any
) -> LoadedData:
    notes: list[str] = []
    if loaded.source or loaded.tokenizer:
        tokenizer = _load_tokenizer(loaded)
    else:
        tokenizer = ByteTokenizer()
        notes.append("text read as bytes (ids 0 to 255): a factory's model has no tokenizer")
    limit = longest_sequence(loaded.model)
    batches, more_notes = model_batches(loaded.model, texts, tokenizer, tokens=tokens, **sizes)
    data = f"{name}, up to {tokens if limit is None else min(tokens, limit)} tokens"
    every = [*batches]  # token ids are small; their number shows how far an audit is
    return LoadedData(every, data, (*notes, *more_notes), tokenizer)


def _load_tokenizer(loaded: LoadedModel) -> Any:
    from transformers import AutoTokenizer

    home = loaded.tokenizer or loaded.source
    revision = "main" if loaded.tokenizer else loaded.revision or "main"
    try:
        # Without this check, some tokenizers would be created empty, and read every text as unknown tokens.
        if Path(home).is_dir() and not any(map(TOKENIZER_FILE.search, os.listdir(home))):
            raise FileNotFoundError("no file of a tokenizer in this folder")
        folder, gguf_file = gguf_location(home)
        options = {"revision": revision, "trust_remote_code": loaded.trust_remote_code, **gguf_file}
        with read_once(home):
            return AutoTokenizer.from_pretrained(folder, **options)
    except InputError:
        raise
    except Exception as error:
        subject = f"tokenizer {home}" if loaded.tokenizer else f"tokenizer of {loaded.name}"
        expected, got = "the files of a tokenizer", f"{type(error).__name__}: {first_line(error)}"
        fix = "Pass --tokenizer NAME or FOLDER, or save it: `tokenizer.save_pretrained(folder)`."
        raise InputError(subject, expected=expected, got=got, fix=fix) from error


class ByteTokenizer:
    """Tokenizer for models without one: the tokens of a text are its UTF-8 bytes."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        """Return the bytes of each text as token ids."""
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, ids: list[int]) -> str:
        """Return the text of the given bytes, with � for incomplete characters."""
        return bytes(ids).decode(errors="replace")


def load_text(path: str | Path) -> str | list[str]:
    """Return the text of a UTF-8 file without byte order mark, or the texts of a `.jsonl(.gz)` file.

    Raise `InputError` if there is no text.
    """
    if _ending(str(path)) == ".jsonl":
        return dataset_texts(str(path), rows=sys.maxsize)
    try:
        piped = Path(path).is_fifo()
        text = (_read_pipe(path) if piped else readable_file(path, "a text file")).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = f"Convert it, for instance: iconv -f LATIN1 -t UTF-8 {path} > utf8.txt"
        raise InputError(str(path), expected="UTF-8 text", got=str(error), fix=fix) from error
    if not text.strip():
        fix = "Pass a file with a paragraph or more."
        raise InputError(str(path), expected="some text", got="an empty file", fix=fix)
    return text


@cache
def _read_pipe(path: str | Path) -> bytes:
    """Return the content of a pipe, which several jobs may read."""
    return Path(path).read_bytes()


class DatasetSpec(NamedTuple):
    """Parts of a data set's name. Without a split, the first of validation, test and train is used."""

    name: str
    config: str = ""
    split: str = ""
    column: str = "text"


def parse_dataset(spec: str) -> DatasetSpec:
    """Parse `NAME[@CONFIG][:SPLIT[:COLUMN]]`; an existing path is the name, even if it contains : or @.

    Examples:
        >>> parse_dataset("imdb:test:text")
        DatasetSpec(name='imdb', config='', split='test', column='text')
        >>> parse_dataset("Salesforce/wikitext@wikitext-2-raw-v1:test").config
        'wikitext-2-raw-v1'
    """
    if spec and Path(spec).exists():
        return DatasetSpec(spec)
    name, *rest = re.split(r":(?![^\[]*\])", spec)  # except colons in brackets, as in test[:100]
    if len(rest) > 2 or not name:
        got = f"{len(rest) + 1} parts" if name else "no name"
        fix = "For instance: --dataset stanfordnlp/imdb:test:text"
        expected = "NAME[@CONFIG][:SPLIT[:COLUMN]]"
        raise InputError(f"--dataset {spec!r}", expected=expected, got=got, fix=fix)
    split, column = (*rest, "", "")[:2]
    config = ""
    if not Path(name).exists():
        name, _, config = name.partition("@")
    return DatasetSpec(name, config, split, column or "text")


def dataset_texts(spec: str, *, rows: int = 4096) -> list[str]:
    """Return at most `rows` texts of a data set, evenly spaced over its rows. A missing text is empty.

    The data set is a name on the Hugging Face Hub, a folder that `datasets` reads or has written, or a file.
    """
    name, config, split, column = _check_dataset(spec)
    try:
        data = _open_dataset(name, config, split)
    except InputError:
        raise
    except Exception as error:  # `datasets` raises errors of many classes
        fix = "Check name, configuration and split: NAME@CONFIG:SPLIT:COLUMN; or pass a file: --text FILE."
        expected = "a data set that can be read"
        raise InputError(name, expected=expected, got=first_line(error), fix=fix) from error
    if column not in data.column_names:
        got = f"the columns {', '.join(map(repr, data.column_names))}"
        fix = did_you_mean(column, data.column_names)
        raise InputError(name, expected=f"a column {column!r}", got=got, fix=fix)
    texts = list(data.select(evenly(len(data), rows)).with_format(None)[column])
    wrong = next((type(text).__name__ for text in texts if not isinstance(text, str | None)), None)
    if wrong or not texts:
        got = f"values of type {wrong}" if wrong else "no rows"
        fix = "Name the column that holds the text: --dataset NAME:SPLIT:COLUMN"
        raise InputError(f"column {column!r} of {name}", expected="texts", got=got, fix=fix)
    return [text or "" for text in texts]


def _check_dataset(spec: str) -> DatasetSpec:
    """Return the parts of a data set's name; raise `InputError` if it is a path to a missing file."""
    parsed = parse_dataset(spec)
    need_package("datasets", spec, "data")
    name = parsed.name
    is_path = name.startswith(("/", ".", "~")) or _ending(name) in READERS
    if is_path and not Path(name).exists():
        raise InputError(name, expected="a data file or folder", got="no such file", fix="Check the path.")
    return parsed


def _ending(name: str) -> str:
    """Return the last ending of a file name in lower case, without .gz."""
    return next((s.lower() for s in reversed(Path(name).suffixes) if s.lower() != ".gz"), "")


def _open_dataset(name: str, config: str, split: str) -> Any:
    from datasets import Dataset, get_dataset_split_names, load_dataset, load_from_disk

    path = Path(name)
    splits: Mapping[str, Any]
    suffix = _ending(name)
    if path.is_file():
        if suffix not in READERS:
            expected = f"a data file ({', '.join(READERS)})"
            raise InputError(name, expected=expected, got=f"{suffix or 'no'} ending", fix="Convert it.")
        # load_dataset("json", …) would send a request to the Hub, and wait if there is no network.
        splits = {"train": getattr(Dataset, f"from_{READERS[suffix]}")(name)}
    elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        saved = load_from_disk(name)
        splits = {"train": saved} if isinstance(saved, Dataset) else saved
    elif path.is_dir():
        splits = load_dataset(name, config or None)
    else:
        split = split or _preferred_split(get_dataset_split_names(name, config or None))
        return load_dataset(name, config or None, split=split)
    split = split or _preferred_split(splits)
    if split not in splits:
        fix = did_you_mean(split, splits)
        raise InputError(name, expected=f"a split {split!r}", got=", ".join(splits), fix=fix)
    return splits[split]


def _preferred_split(names: Iterable[str]) -> str:
    splits = list(names)
    return next((name for name in ("validation", "test", "train") if name in splits), splits[0])


def split_held_out(batches: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return copies of the sequences 0, 2, 4, … and of the sequences 1, 3, 5, … of all batches."""
    halves: tuple[list[Any], list[Any]] = [], []

    def sequences(batch: Any, first: int) -> Any:
        return map_tensors(batch, lambda x: (x[first::2] if x.dim() and len(x) == size else x).clone())

    before = 0
    for batch in batches:
        size = batch_size(batch)
        for half in (0, 1):
            first = (half + before) % 2
            if first < size:
                halves[half].append(sequences(batch, first))
        before += size
    return halves
