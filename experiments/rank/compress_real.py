"""Every way to make real models smaller, next to the ways of other packages, on text that no way has seen.

Question  Which way loses least for the same bytes, on a decoder whose heads have own keys, on a decoder with
          one key head, and on an encoder?
Models    bundled demo (bytes); Gemma 3 270M, dequantized from Q4_K_M, float32; all-MiniLM-L6-v2
Measured  Decoders: loss of the second half of each window, with a cache of the tokens before. Encoder:
          retrieval of a review's second half, accuracy of a linear probe of its sentiment. Each way is
          calibrated on three texts.
Rivals    pip install --no-deps kvpress optipfair cacheshrink optimum-quanto hqq, with cachetools, fire, scipy
          and geoopt. A rival that is not installed or that fails is a row with the reason.
Hardware  one CPU core, about 110 minutes
Expect    Gemma: 4-bit keys and values lose less than latents of the same bytes. Demo: latents of half of the
          bytes lose nothing.
"""

import gzip
import json
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from statistics import mean
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

import rankwise as rw
from experiments.provenance import commit
from experiments.rank.compress_minilm import WIDTH, embed, retrieval, weights_alone
from experiments.rank.compress_minilm import Recipe as Retrieval
from experiments.real_models import require_gemma, require_minilm
from experiments.render import markdown_table
from experiments.study import Report, Study
from rankwise.cli.load_data import load_text
from rankwise.cli.load_model import demo_model, demo_text
from rankwise.compression.kv_find import find_cached_layers, layer_weight
from rankwise.compression.kv_modules import latent_change
from rankwise.compression.kv_solve import largest_ranks, weighted_svd
from rankwise.compression.quantized_cache import quantized_update
from rankwise.errors import first_line

TEXTS = {
    "wikitext-2": "wikitext2/valid.txt",
    "Shakespeare": "tiny_shakespeare/input.txt",
    "IMDB": "imdb/train.jsonl.gz",
}
PACKAGES = ("kvpress", "optipfair", "cacheshrink", "optimum-quanto", "hqq")
REVIEWS = 300
"""Reviews for the linear probe; half of them train it."""
SLOW = ("blocks", "heads, uniform")
"""Ways that are calibrated on the first text alone."""
CACHE = {"8 bits": 8.5 / 16, "4 bits": 4.5 / 16, "3 bits": 3.5 / 16, "2 bits": 2.5 / 16, "alone, 0.5": 0.5,
         "shrink, 0.5": 0.5, "Press, 0.5": 0.5}  # fmt: skip
"""Shares of 16-bit keys and values of the layers without a window that the ways of a cache keep."""
PUBLISHED = {"Gemma 3 270M": [8, 9, 14, 16]}
"""Blocks of a published pruned model, made with optipfair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One model with its ways: for each part, the shares to keep."""

    name: str
    tokens: int
    """Tokens of a window on which the loss is measured."""
    windows: int
    calibration: int
    """Sequences of 256 tokens to calibrate on."""
    keeps: dict[str, tuple[float, ...]]


DEMO = Subject(
    name="bundled demo", tokens=256, windows=32, calibration=32,
    keeps={
        "kv": (0.5, 0.28), "key-heads": (0.5,), "width": (0.5,), "heads": (0.75,),
        "heads, uniform": (0.5,), "blocks": (0.75,),
    },
)  # fmt: skip
GEMMA = Subject(
    name="Gemma 3 270M", tokens=1024, windows=8, calibration=8,
    keeps={
        "kv": (0.6925, 0.557), "key-heads": (0.5,), "heads": (0.75,), "heads, uniform": (0.5,),
        "blocks": (14 / 18,),
    },
)  # fmt: skip
"""Shares of `kv` leave 0.5 and 0.28 of the cache of the layers without a window."""
MINILM = Subject(
    name="all-MiniLM-L6-v2", tokens=192, windows=0, calibration=32,
    keeps={"width": (0.5, 0.25), "heads": (0.9, 0.75), "heads, uniform": (0.75,), "blocks": (5 / 6, 4 / 6)},
)  # fmt: skip


def measure(data: Path) -> Report:
    packages = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    report = {
        "settings": {"subjects": [asdict(subject) for subject in (DEMO, GEMMA, MINILM)]},
        "packages": packages,
        "unit": "nats per token, or the score",
        DEMO.name: decoder_rows(DEMO, str(demo_model()), data),
        MINILM.name: encoder_rows(str(require_minilm()), data),
        GEMMA.name: decoder_rows(GEMMA, str(require_gemma()), data),
    }
    rows_file().unlink()
    return report


@cache
def rows_file() -> Path:
    """Return the file with the rows of an interrupted run of the same commit, empty if the source differs."""
    name = commit() or "+"
    file = Path(gettempdir()) / f"rankwise-compress-real-{name}.jsonl"
    if name.endswith("+"):
        file.unlink(missing_ok=True)
    file.touch()
    return file


def attempt(rows: list[dict[str, Any]], way: str, run: Callable[[], dict[str, Any]], text: str = "") -> None:
    """Add what a way measures, with its seconds, or the reason why it fails.

    `rows` begin with the name of the model, `text` is the name of the calibration text. Rows of a run that
    was interrupted are read from `rows_file`.
    """
    key, begun = {"model": rows[0]["model"], "way": way, "text": text}, time.process_time()
    done = [json.loads(line) for line in rows_file().read_text().splitlines()]
    if kept := [row for row in done if key.items() <= row.items() and "failed" not in row]:
        rows.append(kept[0])
        return
    try:
        row = run()
    except Exception as error:  # a rival can fail in any way
        row = {"failed": f"{type(error).__name__}: {first_line(error)}"}
    rows.append({**key, **row, "seconds": round(time.process_time() - begun)})
    with rows_file().open("a") as file:
        print(json.dumps(rows[-1]), file=file, flush=True)


def texts(folder: Path | str, data: Path) -> dict[str, Any]:
    """Return token ids of the texts by name; of the demo, bytes, with its own text in place of wikitext-2."""
    own = str(folder) == str(demo_model())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = {}
    for name, file in TEXTS.items():
        text = load_text(demo_text() if own and name == "wikitext-2" else data / file)
        text = text if isinstance(text, str) else "\n\n".join(text[:400])
        result["own text" if own and name == "wikitext-2" else name] = torch.tensor(
            tokenizer(text[:1_200_000], add_special_tokens=False).input_ids
        )
    return result


def windows(ids: Tensor, count: int, tokens: int, first: int | None) -> Tensor:
    """Return windows of ids, each with the token that begins a text if the model has one."""
    content = tokens - (first is not None)
    rows = ids[: count * content].view(-1, content)
    return rows if first is None else torch.cat([rows.new_full((len(rows), 1), first), rows], 1)


# --- decoders --------------------------------------------------------------------------------------------


def decoder_rows(subject: Subject, folder: str, data: Path) -> list[dict[str, Any]]:
    """Measure every way on one decoder."""
    load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)
    original, ids = load().eval(), texts(folder, data)
    first = AutoTokenizer.from_pretrained(folder).bos_token_id
    own = next(iter(ids.values()))
    held_out = windows(own[-subject.windows * subject.tokens :], subject.windows, subject.tokens, first)
    before = continued_losses(original, held_out)
    rows: list[dict[str, Any]] = [
        {"model": subject.name, "way": "original", "loss": before.mean().item(), "seconds": 0}
    ]

    def added(model: nn.Module, **options: Any) -> dict[str, Any]:
        change = continued_losses(model, held_out, **options) - before
        return {"added": change.mean().item(), "spread": (change.std() / len(change) ** 0.5).item()}

    def compressed(part: str, keep: float, calibration: Tensor) -> dict[str, Any]:
        model, (name, _, uniform) = load().eval(), part.partition(", ")
        *batches, others = [{"input_ids": rows} for rows in calibration.split(2)]
        record = rw.compress(model, batches, keep, parts=name, uniform=bool(uniform), held_out=[others])
        sizes = [sum(getattr(latent, size) for latent in record.latents) for size in ("rank", "channels")]
        cache = record.kept_cache.after / record.kept_cache.before if not all(sizes) else sizes[0] / sizes[1]
        return added(model) | {
            "cache": cache, "parameters": record.parameters_after / record.parameters_before
        }  # fmt: skip

    for part, keeps in subject.keeps.items():
        for keep in keeps:
            for name, text in list(ids.items())[: 1 if part in SLOW else None]:
                calibration = windows(text, subject.calibration + 2, 256, first)
                attempt(rows, f"{part}, {keep:.2g}", partial(compressed, part, keep, calibration), name)
    rivals: dict[str, Callable[[], dict[str, Any]]] = {
        "latents of weights alone, 0.5": lambda: added(svd_of_weights(load().eval(), held_out)),
        "cacheshrink, 0.5": lambda: added(shrunk(folder, own)),
    }
    if original.config.num_key_value_heads > 1:
        rivals["key heads, means of two"] = lambda: added(half_of_key_heads(original, torch.Tensor.mean))
        rivals["key heads, one of two"] = lambda: added(
            half_of_key_heads(original, lambda x, dim: x.select(dim, 0))
        )
    for bits in (8, 4, 3):
        rivals[f"simulated, {bits} bits"] = partial(added, original, cache=partial(rounded, bits, original))
    for package, bits in (
        ("hqq by token", 8),
        ("hqq by token", 4),
        ("hqq", 8),
        ("hqq", 4),
        ("quanto", 4),
        ("hqq", 2),
        ("quanto", 2),
    ):
        cache = partial(quantized, package, bits, original)
        rivals[f"{package}, {bits} bits"] = partial(added, original, cache=cache)
    for press in ("SnapKVPress", "ExpectedAttentionPress", "KnormPress", "StreamingLLMPress"):
        rivals[f"kvpress {press}, 0.5"] = partial(added, original, press=partial(pressed, press, original))
    if blocks := PUBLISHED.get(subject.name):
        rivals[f"optipfair, without blocks {blocks}"] = lambda: added(pruned(load(), blocks))
    for way, run in rivals.items():
        attempt(rows, way, run)
    return rows


def continued_losses(
    model: Any,
    ids: Tensor,
    cache: Callable[[], Cache] | None = None,
    press: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Return the loss of the second half of each window, with a cache of the tokens before.

    64 tokens are read at once: a quantized cache of transformers rounds what earlier calls have read.
    """
    half, losses = ids.shape[1] // 2, []
    with torch.no_grad():
        for row in ids:
            kept = cache() if cache else DynamicCache(config=model.config)
            places = torch.arange(len(row))
            with press():  # kvpress reads `cache_position`, which newer models ignore
                model.base_model(row[None, :half], past_key_values=kept, cache_position=places[:half])
            logits = torch.cat([
                model(row[None, part], past_key_values=kept, position_ids=part[None]).logits[0]
                for part in places[half:].split(64)
            ])  # fmt: skip
            losses.append(F.cross_entropy(logits[:-1], row[half + 1 :]))
    return torch.stack(losses)


def svd_of_weights(model: Any, ids: Tensor) -> nn.Module:
    """Give a model latents of half of the bytes that the SVD of the weights alone yields."""
    layers, _ = find_cached_layers(model, {"input_ids": ids[:2, :64]})
    spectra = [weighted_svd(layer_weight(model, layer)) for layer in layers]
    ranks = largest_ranks([spectrum.nats for spectrum in spectra], sum(layer.full for layer in layers) // 2)
    factors = [spectrum.factors(rank) for spectrum, rank in zip(spectra, ranks, strict=True)]
    latent_change(model, layers, factors).apply()
    return model


def half_of_key_heads(model: Any, merge: Callable[[Tensor, int], Tensor]) -> nn.Module:
    """Return a model in which each two key heads are merged, without any data."""
    heads = model.config.num_key_value_heads // 2
    smaller = type(model)(type(model.config)(**{**model.config.to_dict(), "num_key_value_heads": heads}))
    weights = {
        name: merge(weight.unflatten(0, (heads, 2, -1)), 1).flatten(0, 1)
        if "k_proj" in name or "v_proj" in name
        else weight
        for name, weight in model.state_dict().items()
    }
    smaller.load_state_dict(weights)
    return smaller.eval()


def quantized(package: str, bits: int, model: Any) -> Cache:
    """Return a cache with keys quantized by channel or by token, in all layers without a window.

    With quanto, a group has 64 tokens of one head; with hqq, 64 tokens of all heads.
    """
    layer, keys, values = {
        "hqq": ("HQQQuantizedLayer", 0, 1),
        "hqq by token": ("HQQQuantizedLayer", 1, 1),
        "quanto": ("QuantoQuantizedLayer", -1, 0),
    }[package]
    make = partial(
        getattr(import_module("transformers.cache_utils"), layer),
        nbits=bits, axis_key=keys, axis_value=values, q_group_size=64, residual_length=1,
    )  # fmt: skip
    cache = DynamicCache(config=model.config)
    cache.layers = [make() if type(each) is DynamicLayer else each for each in cache.layers]
    return cache


def rounded(bits: int, model: Any) -> Cache:
    """Return a cache that rounds all keys and values like the preview of Rankwise."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.update = partial(quantized_update, layer.update, bits)
    return cache


def pressed(press: str, model: Any) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = getattr(import_module("kvpress"), press)(compression_ratio=0.5)(
        model
    )
    return context


def shrunk(folder: str, ids: Tensor) -> Any:
    """Return the model of cacheshrink with half of the cache, calibrated on 32 texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, _ = import_module("cacheshrink").convert_to_mla(
        folder, compression_ratio=2.0, dtype=torch.float32, verbose=False, num_calibration_samples=32,
        calibration_texts=tokenizer.batch_decode(ids[: 32 * 256].view(32, 256)), max_calibration_length=256,
    )  # fmt: skip
    return model.eval()


def pruned(model: Any, blocks: list[int]) -> Any:
    prune = import_module("optipfair").prune_model
    return prune(model, pruning_type="DEPTH", layer_indices=blocks, show_progress=False).eval()


# --- encoder ---------------------------------------------------------------------------------------------


def encoder_rows(folder: str, data: Path) -> list[dict[str, Any]]:
    """Measure every way on the encoder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=MINILM.tokens)
    reviews = list(load_text(data / "imdb" / "test.jsonl.gz"))
    with gzip.open(data / "imdb" / "train.jsonl.gz", "rt") as file:
        labelled = [json.loads(line) for line in islice(file, REVIEWS)]

    def scores(model: nn.Module) -> dict[str, Any]:
        found = {"retrieval": retrieval(Retrieval(pairs=200), model, tokenizer, reviews)}
        states = embed(model, tokenizer, [review["text"] for review in labelled])
        return found | {"probe": probe(states, torch.tensor([review["label"] for review in labelled]))}

    def compressed(part: str, keep: float, calibration: Tensor) -> dict[str, Any]:
        model, (name, _, uniform) = load().eval(), part.partition(", ")
        *batches, others = [{"input_ids": rows} for rows in calibration.split(8)]
        record = rw.compress(model, batches, keep, parts=name, uniform=bool(uniform), held_out=[others])
        return scores(model) | {"parameters": record.parameters_after / record.parameters_before}

    load = partial(AutoModel.from_pretrained, folder)
    rows: list[dict[str, Any]] = [
        {"model": MINILM.name, "way": "original", **scores(load().eval()), "seconds": 0}
    ]
    ids = texts(folder, data)
    batch = {"input_ids": windows(ids["IMDB"], 8, MINILM.tokens, tokenizer.cls_token_id)}
    for keep in MINILM.keeps["width"]:
        narrowed = partial(weights_alone, batch=batch, width=round(keep * WIDTH))
        attempt(rows, f"width of weights alone, {keep:.2g}", lambda n=narrowed: scores(n(load().eval())))
    for part, keeps in MINILM.keeps.items():
        for keep in keeps:
            for name, text in ids.items():
                calibration = windows(text, MINILM.calibration + 8, MINILM.tokens, tokenizer.cls_token_id)
                attempt(rows, f"{part}, {keep:.2g}", partial(compressed, part, keep, calibration), name)
    return rows


def probe(states: Tensor, positive: Tensor) -> float:
    """Return the accuracy of ridge regression on every second review, trained on the others."""
    design = F.pad(states.double(), (0, 1), value=1.0)
    target = 2.0 * positive.double() - 1
    train, test = slice(0, None, 2), slice(1, None, 2)
    moments = design[train].mT @ design[train] + torch.eye(design.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(moments, design[train].mT @ target[train])
    return float(((design[test] @ weights > 0) == (target[test] > 0)).double().mean())


# --- page ------------------------------------------------------------------------------------------------


def tables(report: Report) -> dict[str, str]:
    """Return the packages, and one table per model: a row per way, one number for each calibration text."""
    result = {"packages": ", ".join(f"{name} {number}" for name, number in report["packages"].items())}
    for mark, subject in {"demo": DEMO, "gemma": GEMMA, "minilm": MINILM}.items():
        names = ("retrieval", "probe") if subject is MINILM else ("added", "spread", "cache")
        ways: dict[str, list[dict[str, Any]]] = {}
        for row in report[subject.name]:
            cache = next(({"cache": share} for end, share in CACHE.items() if row["way"].endswith(end)), {})
            ways.setdefault(row["way"], []).append({**cache, **row})
        lines = []
        for way, rows in ways.items():
            cells = [", ".join(f"{row[name]:.4f}" for row in rows if name in row) for name in names[:2]]
            for name in (*names[2:], "parameters"):
                cells.append(f"{rows[0][name]:.2f}" if name in rows[0] else "–")
            reason = textwrap.shorten(rows[0].get("failed", ""), 110, placeholder=" …")
            failed = [reason, *["–"] * len(names)] if reason else cells
            lines.append((way, *failed, str(round(mean(row["seconds"] for row in rows)))))
        result[mark] = markdown_table(("way, share kept", *names, "parameters", "seconds"), lines)
    return result


STUDY = Study("compress_real", measure, "evidence/compress-real", tables)
