"""Previews: rows that equal the outcome of `compress`, and advice that is followed."""

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compression.compression_cases import SIZES, bert, gpt2, ids, llama, made, windowed
from tests.compression.test_compress_command import FACTORY, Run, run, words
from tests.support.documents import preview_document
from tests.support.untouched import untouched
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache

import rankwise as rw
from rankwise.cli.load_model import demo_model, demo_text
from rankwise.compression import Compression, Preview, PreviewRow, WindowCost, preview
from rankwise.compression.records import PAYS_COST
from rankwise.errors import CompressionError, InputError

assert run  # a fixture
DATA: dict[str, Any] = {"batches": [ids(8, 30)], "held_out": [ids(4, 30, 1), ids(3, 60, 2)]}


# --- rows -----------------------------------------------------------------------------------------------


@pytest.mark.extra
@pytest.mark.parametrize("make", [llama, windowed])
def test_the_printed_generation_runs_also_with_windows(make: Any) -> None:
    pytest.importorskip("hqq")
    model: Any = make()
    done = preview(model, **DATA, parts="width")
    done = done.model_copy(update={"rows": [row for row in done.rows if not row.part]})
    [best] = {done.recommended("memory")}
    assert best is not None
    document = preview_document(done)
    code = document.sections[-1].code
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    if make is windowed:
        with pytest.raises(ValueError, match="only full attention layers"):
            model.generate(ids(2, 9)["input_ids"], cache_implementation="quantized", **options)
    lines, _, call = code.rpartition("\n")
    names = {"model": model, "ids": ids(4, 16)["input_ids"], "options": options}
    exec(lines, names)
    texts = eval(call.replace("(ids, ", "(ids, **options, "), names)
    assert texts.shape == (4, 19)  # groups of 64 numbers must fit


@pytest.mark.extra
def test_the_printed_cache_adds_at_most_the_promised_loss() -> None:
    """On the demo: loss of the second half of each window, with a cache of the tokens before."""
    pytest.importorskip("hqq")
    code = preview_document(rows_of(("", 0.0, 53, 100, math.nan))).sections[-1].code
    settings = eval(re.search(r"cache_config=({.*?})", code)[1])
    model = AutoModelForCausalLM.from_pretrained(demo_model()).eval()
    windows = torch.tensor([byte + 3 for byte in demo_text().read_bytes()[: 8 * 256]]).view(8, 256)

    def loss(cache: Any) -> float:
        parts = [model(part, past_key_values=cache).logits for part in windows.split(64, dim=1)]
        logits = torch.cat(parts, dim=1)[:, 127:-1]
        return float(functional.cross_entropy(logits.transpose(1, 2), windows[:, 128:]))

    with torch.no_grad():
        exact = loss(DynamicCache(config=model.config))
        added = (
            loss(QuantizedCache(settings.pop("backend"), model.config, residual_length=1, **settings)) - exact
        )
    assert 0 < abs(added) < PAYS_COST * exact


def own_keys() -> Any:
    """A key head for each query head, with rotary positions."""
    return made("Llama", **SIZES, max_position_embeddings=64)


@pytest.mark.parametrize("part", rw.compression.PARTS)
def test_rows_are_the_outcome_of_compress(part: str) -> None:
    make = {"key-heads": own_keys, "kv": llama}.get(part, gpt2)
    model = make()
    with untouched(model):
        done = preview(model, **DATA, parts=part)
    rows, advised = [row for row in done.rows if row.part and not row.bits], []
    uniform = [False] * 3 + [True] * 3 * (part == "heads")
    assert [(row.keep, row.uniform) for row in rows] == list(
        zip([0.75, 0.5, 0.25] * 2, uniform, strict=False)
    )
    for row in (row for row in rows if row.keep != 0.5 or row.refused):
        options: dict[str, Any] = {"held_out": DATA["held_out"], "uniform": row.uniform}
        if row.refused:
            with pytest.raises(CompressionError, match=re.escape(row.refused)):
                rw.compress(make(), DATA["batches"], keep={part: row.keep}, **options)
            continue
        outcome = rw.compress(make(), DATA["batches"], keep={part: row.keep}, **options)
        assert row.cost.loss_added == pytest.approx(outcome.worst.loss_added, rel=1e-6, abs=1e-9)
        assert (row.cost.tokens, row.parameters) == (outcome.worst.tokens, outcome.parameters_after)
        assert (row.cache_bytes, done.cache_bytes) == (outcome.kept_cache.after, outcome.kept_cache.before)
        assert row.kept_keys == outcome.kept_cache.kept_keys
        better = [
            other.cache_bytes <= row.cache_bytes + row.kept_keys
            and other.cost.loss_added < outcome.worst.loss_added
            for other in outcome.quantized[:1]  # 8 bits
        ]
        advised.append(any("quantize the cache of the original" in note for note in outcome.notes))
        assert advised[-1] == any(better)
    assert [row.bits for row in done.rows if not row.part] == [8, 4, 3]
    if part == "kv":  # rows of simulated caches stand next to the result
        assert [row.model_dump() for row in outcome.quantized] == [row.model_dump() for row in done.rows[:2]]
        latents = [row for row in done.rows if row.part and row.bits]
        for row, other in zip(latents, rows, strict=True):
            assert row.cache_bytes < other.cache_bytes
            assert row.cost.loss_added != other.cost.loss_added
        assert any(advised)


def test_a_quantized_cache_has_the_bytes_of_its_numbers_scales_and_zeros() -> None:
    done = preview(windowed(), **DATA, parts="kv")
    numbers, tokens = 2 * 2 * 8, (7, 64)  # keys and values of two heads of 8; a window and all tokens
    assert done.cache_bytes == sum(4 * numbers * count for count in tokens)
    for row in done.rows[:3]:
        per_token = numbers * row.bits / 8 + 4 * (16 / 64 + 1)
        assert row.cache_bytes == round(4 * numbers * tokens[0] + per_token * tokens[1])


def test_latents_of_8_bits_have_the_bytes_of_their_numbers_scales_and_zeros() -> None:
    done = preview(made("Llama", **SIZES | {"hidden_size": 256}), **DATA, parts="kv")
    model = made("Llama", **SIZES | {"hidden_size": 256})
    ranks = [latent.rank for latent in rw.compress(model, **DATA, keep={"kv": 0.75}).latents]
    assert max(ranks) > 64
    per_token = sum(rank + 4 * math.ceil(rank / 64) + 4 for rank in ranks)  # and the position, of 4 bytes
    [row] = [row for row in done.rows if row.part and row.bits and row.keep == 0.75]
    assert row.cache_bytes == done.cache_tokens * per_token


def test_a_way_that_a_model_does_not_allow_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    done = preview(bert(), [ids(8, 30)], parts=("width", "kv"))
    assert [(row.part, bool(row.refused)) for row in done.rows if row.part == "kv"] == [("kv", True)]
    assert not any(row.bits for row in done.rows)
    assert math.isnan(done.rows[0].cost.loss_before)
    assert done.rows[0].cost.output_error > 0
    assert "of the cache" not in preview_document(done).verdict.sentence  # an encoder has none
    cache = {**ids(8, 30), "past_key_values": DynamicCache()}
    [row, *_] = preview(gpt2(), [cache], parts="heads").rows
    assert "the batch: expected no cache, got a DynamicCache. Leave it out" in row.refused
    monkeypatch.setattr("rankwise.compression.width_solve.head_curves", lambda *_: 1 / 0)
    done = preview(gpt2(), **DATA, parts=("width", "kv"))
    assert {row.refused for row in done.rows if row.part == "width"} == {
        "ZeroDivisionError: division by zero"
    }
    assert not any(row.refused for row in done.rows if row.part == "kv")
    monkeypatch.setattr("rankwise.compression.heads_find.find", lambda *_: 1 / 0)
    row, *others = preview(gpt2(), **DATA, parts=("heads", "kv")).rows[3:]
    assert (row.part, row.refused) == ("heads", "ZeroDivisionError: division by zero")
    assert not any(row.refused for row in others)


def test_models_and_data_that_cannot_be_previewed_are_refused() -> None:
    model = gpt2()
    rw.compress(model, [ids()], keep={"width": 0.5})
    with pytest.raises(CompressionError, match="not compressed yet"):
        preview(model, [ids()])
    with pytest.raises(InputError, match="`held_out`: expected an iterable of at least one batch"):
        preview(gpt2(), [ids()], held_out=[])
    broken: Any = gpt2()
    broken.transformer.h[0].attn.c_attn.weight.data[0, 0] = math.nan
    with pytest.raises(CompressionError, match="expected finite weights, got NaN or infinity in 1 of"):
        preview(broken, [ids()])
    one = preview(gpt2(), [ids(8, 30)], held_out=[ids(1, 30, 1)], parts="kv")
    assert all(math.isnan(row.cost.spread) and math.isfinite(row.cost.loss_added) for row in one.rows)


def rows_of(
    *rows: tuple[str, float, int, int, float], bits: int = 8, kept: int = 0, spread: float = 0.0
) -> Preview:
    """Rows of part, loss added, bytes of cache, parameters and time, next to 100, 100 and 1.0."""
    made = [
        PreviewRow(
            part=part, keep=0.5, bits=0 if part else bits, parameters=parameters, time=time,
            cache_bytes=cache, kept_keys=kept * (part == "kv"),
            cost=WindowCost(tokens=9, windows=2, loss_before=2.0, loss_added=added, spread=spread),
        )
        for part, added, cache, parameters, time in rows
    ]  # fmt: skip
    return Preview(
        model="m", measured_on="held-out data", cache_tokens=9, parameters=100, cache_bytes=100, rows=made
    )


def test_the_first_line_recommends_the_least_of_what_pays() -> None:
    record = rows_of(
        ("", 0.02, 30, 100, math.nan), ("kv", 0.01, 40, 98, 2.0), ("heads", 0.019, 90, 90, 0.9),
        ("width", 0.03, 20, 50, 0.5), ("blocks", 0.0, 96, 96, 0.91),
    )  # fmt: skip
    line = preview_document(record).verdict.sentence
    assert line == (
        "For memory: 8-bit keys and values (30% of the cache, +1.00% loss). "
        "For fewer parameters: heads, keep 0.5 (90% of the parameters, +0.95% loss). "
        "For speed: heads, keep 0.5 (90% of the time, +0.95% loss)."
    )
    assert preview_document(rows_of(("kv", 0.01, 40, 98, 2.0))).verdict.sentence == (
        "For memory: kv, keep 0.5 (40% of the cache, +0.50% loss). "
        "Nothing pays for fewer parameters or for speed."
    )
    assert (
        "Nothing pays: no way costs at most 1% loss"
        in preview_document(rows_of(("kv", 0.03, 40, 98, 2.0))).verdict.sentence
    )
    assert rows_of(("", 0.0, 30, 100, math.nan), bits=4).recommended("memory") is None
    for uncertain in (0.011, math.nan):  # two standard errors above 1 %, and one window
        assert rows_of(("kv", 0.0, 40, 98, 2.0), spread=uncertain).recommended("memory") is None
    assert math.isnan(WindowCost(loss_before=0.0, loss_added=1.0).relative)
    assert rows_of(("kv", 0.0, 40, 100, 2.0), kept=56).recommended("memory") is None
    sentence = preview_document(rows_of(("kv", 0.0, 40, 100, 2.0), kept=50)).verdict.sentence
    assert "(90% of the cache, kept keys included, +0.00% loss)" in sentence


# --- command --------------------------------------------------------------------------------------------


@pytest.fixture
def easy(run: Run) -> Run:
    """A model of which a quarter of the key width costs nothing, and is slow to run whole."""
    Path("easy.py").write_text(
        FACTORY.replace(
            "return gpt2()",
            """model = gpt2()
    for block in model.transformer.h:
        block.attn.c_attn.weight.data[:, :64].view(32, 8, 8)[..., 2:] = 0
        block.attn.c_attn.bias.data[:64].view(8, 8)[..., 2:] = 0
    return model""",
        )
    )
    return run


def test_the_printed_commands_lead_to_the_printed_numbers(easy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for speed: narrow layers are said to take half of the time."""
    seconds = {"seconds_before": 2.0, "seconds_after": 1.0}
    monkeypatch.setattr("rankwise.compression.evaluate.measure_seconds", lambda *_: seconds)
    monkeypatch.setenv("COLUMNS", "200")
    files = sorted(Path().glob("[!_]*"))  # the import writes bytecode
    done = easy("compress", "easy.py:build", "--preview", "--parts", "width", "--seed", 3)
    assert sorted(Path().glob("[!_]*")) == files
    assert "For fewer parameters: width, keep 0.75" in words(done)
    [line] = {line for line in done.output.splitlines() if line.startswith("rankwise compress")}
    assert line.endswith("--seed 3 --parts width --keep 0.75 --out width-0.75")
    easy(*shlex.split(line)[1:])
    record = Compression.load("width-0.75")
    [row] = [line for line in done.output.splitlines() if line.startswith("width, keep 0.75")]
    cells = re.split(r"\s{2,}", row.strip())
    assert float(cells[1]) == pytest.approx(record.worst.loss_added, abs=5e-5)
    assert cells[4] == f"{record.kept_cache.after / 1e6:.3g} MB"
    assert cells[6] == f"{record.parameters_after / 1e6:.4g} M"


def test_the_printed_commands_of_a_preview_can_be_followed_in_order(run: Run) -> None:
    Path("four.py").write_text("""
from tests.compression.compression_cases import SIZES, ids, made
def build():
    return made("Llama", **SIZES, num_key_value_heads=4), [ids(6, 30, seed) for seed in range(4)]
""")
    record = rows_of(("heads", 0.0, 50, 90, 0.9), ("key-heads", 0.0, 60, 80, 0.9))
    rows = [row.model_copy(update={"uniform": row.part == "heads"}) for row in record.rows]
    document = preview_document(
        record.model_copy(update={"rows": rows}), "rankwise compress four.py:build --seed 1"
    )
    lines = document.sections[-1].code.splitlines()
    assert len(lines) == 2
    for line in lines:
        run(*shlex.split(line)[1:])
    assert {path.parent.name for path in Path().glob("*/compression.json")} == {
        "uniform-heads-0.5",
        "key-heads-0.5",
    }


def test_an_interrupt_prints_the_rows_that_are_finished(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankwise.compression.ways.solve_part", stopped)
    done = run("compress", "own.py:build", "--preview", works=False)
    assert all(f"{bits}-bit keys" in words(done) for bits in (8, 4, 3))
    assert "heads" not in words(done)


@pytest.mark.parametrize("option", [("--keep", "0.5"), ("--out", "new"), ("--time",), ("--tolerance", "0.1")])
def test_a_preview_refuses_targets_and_outputs(run: Run, option: tuple[str, ...]) -> None:
    done = run("compress", "own.py:build", "--preview", *option, works=False)
    assert f"--preview: expected no {option[0]}" in str(done.exception)
