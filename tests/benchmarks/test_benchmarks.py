"""Benchmarks run, compare runs within rounds, and exit with status 1 if an answer is wrong."""

import json
import random
import re
from pathlib import Path

import benchmarks.__main__ as command
import pytest
import torch
from benchmarks import audit, device, estimate, language, offload, state_space, tssa
from benchmarks.harness import in_fresh_process, peak_mib, ratio
from benchmarks.tssa import EAGER, OURS, REFERENCE, SDPA, contenders, crossover, errors, inputs, is_right

CPU = torch.device("cpu")
WAYS = ("exact", "estimate")
ROOT = Path(__file__).parents[2]
KEPT = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}


def test_the_interval_of_a_ratio_holds_the_median_in_95_percent_of_samples():
    dice, hits = random.Random(0), 0
    for _ in range(1000):
        found = ratio([dice.random() for _ in range(21)], [1.0] * 21)
        assert found.low <= found.median <= found.high
        hits += found.low <= 0.5 <= found.high
    assert (
        930 <= hits <= 1000
    )  # binomial: 950 less three standard deviations of 7; intervals are too wide by ties


def test_a_slow_round_does_not_change_a_ratio_within_rounds():
    assert ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == (2.0, 2.0, 2.0)


def test_peak_memory_is_measured_for_one_call():
    found = peak_mib(lambda: torch.ones(40 << 20, dtype=torch.uint8), CPU)
    assert found is None or 39 <= found <= 60
    assert in_fresh_process("state_space", what="Mamba-2", tokens=16, device="cpu") != 0


@pytest.mark.parametrize(
    ("points", "length"),
    [
        ([(256, 2.0), (512, 4.0)], 256),
        ([(256, 0.5), (1024, 2.0)], 512),
        ([(256, 0.25), (512, 0.5)], None),
        ([], None),
    ],
)
def test_the_crossover_is_where_the_ratio_passes_one(points, length):
    rows = [{"tokens": tokens, "times_ours": {SDPA: (times,) * 3}} for tokens, times in points]
    assert crossover(rows) == (None if length is None else pytest.approx(length))


@pytest.mark.parametrize("causal", [False, True])
def test_contenders_of_tssa_agree(causal):
    runs = contenders(inputs(20, causal, "cpu", torch.float32, heads=2, width=8))
    torch.testing.assert_close(runs[OURS](), runs[EAGER]())
    torch.testing.assert_close(runs[OURS](), runs[REFERENCE]())
    assert runs[SDPA]().shape == (1, 20, 2, 8)


@pytest.mark.parametrize("entry", [3e-4, 3e-5])
def test_an_entry_near_zero_does_not_hide_a_wrong_kernel(entry, monkeypatch):
    """At a first token the share is 1 for any w, so its gradient is a difference of two terms of 2/w."""
    x, real = inputs(256, True, "cpu", torch.float32), contenders
    x.w[0, 0, 3, 5] = entry
    x.w.requires_grad_()
    assert is_right(errors(x, backward=True), torch.float32)
    bend = torch.ones_like(x.w)
    bend[:, 100:] = 1.0001
    monkeypatch.setattr(tssa, "contenders", lambda x: real(x) | {OURS: lambda: real(x)[OURS]() * bend})
    assert not is_right(errors(x, backward=True), torch.float32)
    assert not is_right(errors(x._replace(w=x.w.detach()), backward=False), torch.float32)
    assert not is_right({OURS: float("nan"), REFERENCE: 1.0}, torch.float32)


@pytest.mark.parametrize("name", command.NAMES)
def test_a_benchmark_runs_and_writes_its_rows(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(language, "MODELS", ("transformer", "tost"))
    monkeypatch.setattr(state_space, "in_fresh_process", lambda *_, **__: None)
    for module in (audit, estimate, offload):
        monkeypatch.setattr(module, "in_fresh_process", lambda _, module=module, **job: module.peak(**job))
    out, threads = tmp_path / "out.json", torch.get_num_threads()
    size = {"tssa": ["--tokens", "64", "16"], "device": ["--tokens", "32"]}.get(name, [])
    try:
        assert command.main([name, "--quick", "--repeats", "1", "--out", str(out), *size]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(out.read_text())
    assert list(report) == ["machine", "command", "settings", "rows"]
    assert report["rows"]
    assert all(row.get("right", True) for row in report["rows"])
    assert len(capsys.readouterr().out.splitlines()) > len(report["rows"])
    fields = set().union(*report["rows"]) | {"peak_mib"}
    for path, kept in KEPT.items():
        if kept["command"].split()[3] == name:
            assert set().union(*kept["rows"]) <= fields, path
    if name == "tssa":
        assert [row["tokens"] for row in report["rows"][:-2]] == [16, 64] * 4
        assert {row["state_bytes"][OURS] for row in report["rows"][-2:]} == {4 * (2 * 12 * 64 + 12) + 8}


def test_a_part_that_would_not_end_in_time_is_left_out_and_shares_are_of_the_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(device.time, "perf_counter", iter(range(10**6)).__next__)  # a second per reading
    out = tmp_path / "out.json"
    words = ["--quick", "--only", "audits", "--tokens", "16", "32", "--seconds", "50", "--out", str(out)]
    assert command.main(["device", *words]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["part"], row["tokens"]) for row in rows] == [
        ("exact", 16), ("estimate", 16), ("exact", 32), ("estimate", 32)
    ]  # fmt: skip
    assert sum(rows[0]["shares"].values()) == pytest.approx(1)
    assert [row["left_out"].split(" of ")[1] for row in rows[2:]] == ["the 50 s in all"] * 2


def test_an_audit_before_a_change_is_compared_number_by_number(monkeypatch, tmp_path):
    """A copy of the project represents the earlier version; one of its numbers is then changed."""

    def fresh(_: str, path: list[Path] | None = None, **job):
        done = audit.peak(**job)
        for head in done["numbers"]["heads"][:1] if path else ():
            head["row_entropy"] *= 1.5
        return done

    monkeypatch.setattr(audit, "in_fresh_process", fresh)
    out = tmp_path / "out.json"
    assert command.main(["audit", "--quick", "--repeats", "1", "--before", ".", "--out", str(out)]) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert row["largest_change"] == [pytest.approx(1 / 3), "heads.row_entropy"]
    assert set(row["seconds"]) == {"by hand", "audit", "audit before"}


@pytest.mark.parametrize("backward", [False, True], ids=["output", "gradient"])
def test_a_wrong_kernel_ends_the_benchmark_with_status_1(monkeypatch, tmp_path, capsys, backward):
    real = contenders

    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone() if backward else 1.001 * y

        @staticmethod
        def backward(ctx, given):
            return 1.001 * given

    monkeypatch.setattr(tssa, "contenders", lambda x: real(x) | {OURS: lambda: Bent.apply(real(x)[OURS]())})
    out = tmp_path / "out.json"
    assert command.main(["tssa", "--quick", "--repeats", "1", "--tokens", "16", "--out", str(out)]) == 1
    assert [row["right"] for row in json.loads(out.read_text())["rows"][:4]] == [backward, False] * 2
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--dtype", "int8"], ["--device", "tpu"], ["--tokens", "12,x"], ["--tokens", "0"]], ids=" ".join
)
def test_a_wrong_option_is_refused(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["tssa", *wrong])
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["device", "tssa"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_missing_is_one_line(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([name, "--device", "cuda"])
    assert "--device cuda: expected a device that torch sees" in capsys.readouterr().err.splitlines()[-1]


def test_kept_results_have_one_format_and_name_their_command():
    assert len(KEPT) > 7
    for name, report in KEPT.items():
        assert list(report) == ["machine", "command", "settings", "rows"], name
        assert re.match(rf"python -m benchmarks ({'|'.join(command.NAMES)})( |$)", report["command"]), name
        assert report["rows"], name


def short(number):
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"


def percents(numbers, digits=1):
    return [f"{100 * number:.{digits}f}".replace("-0.0", "0.0") for number in numbers]


def signed(ratio):
    median, low, high = (f"{100 * one:+.1f}".replace("-0.0", "0.0") for one in ratio)
    return f"{median} % ({low} … {high})"


def of_state_space(rows):
    times, memory = rows[:2], {row["layer"]: row["mib"] for row in rows[2:]}
    for row in times:
        yield f"| {row['exponent']:.2f} | {memory[row['layer']]:.0f} MiB |"
    yield f"need {memory['Mamba, dense of 16 channels']:.0f} MiB"


def of_monitor(rows):
    shares = percents((row["audit"][0] for row in rows), 2)
    yield "{} % of the training time of a model of the demo's size, and {} % for six layers".format(*shares)


def of_skip(rows):
    for row in rows:
        shares = [signed(row["with"]), signed(row["against itself"]), f"{percents(row['limit'])[0]} %"]
        yield f"{row['sites']} λ-skips"
        yield f"| {' | '.join(shares)} |"


def of_tssa(rows):
    for row in rows[:4]:
        fastest = row["fastest_milliseconds"]
        numbers = row["times_ours"][EAGER][0], fastest[EAGER] / fastest[OURS], row["times_ours"][SDPA][0]
        yield f"forward{' and backward' * row['backward']} | {' | '.join(map(short, numbers))} |"
    output = 8192 * 12 * 64 * 4 / 2**20
    ours, eager = ([row["peak_mib"][name] - output for row in rows[:4:2]] for name in (OURS, EAGER))
    yield f"needs {ours[0]:.1f} to {ours[1]:.1f} MiB"
    yield f"the eager formulas {eager[0]:.0f} to {eager[1]:.0f} MiB"
    ours, others = ([row["microseconds"][name] / 1000 for row in rows[4:]] for name in (OURS, SDPA))
    yield f"takes {ours[0]:.1f} ms at position 1,024 and {ours[1]:.1f} ms at 65,536"
    yield f"takes {others[0]:.2f} ms and {others[1]:.0f} ms"


def of_rank(rows):
    for way, words in (("float64", "slower for causal heads"), ("float32", "in float32")):
        causal, full = (row["results"][f"svdvals {way}"]["times_ours"][0] for row in rows)
        between = f" times {words} and" if way == "float64" else " and"
        yield f"{causal:.1f}{between} {full:.1f} times"


def of_estimate(rows):
    near = [row for row in rows if row["part"] == "accuracy"]
    names = ("effective_rank", "stable_rank")
    worst = [max(abs(row[f"{name}_error"]) for row in near) for name in names]
    yield f"effective rank is within {100 * worst[0]:.2f} % of"
    yield f"stable rank within {worst[1]:.0e}"
    held = [sum(row[f"{name}_held"] for row in near) for name in names]
    yield f"effective rank of {held[0]} of {len(near)} heads, the stable rank of {held[1]} of {len(near)},"
    counts = [count["held"] for row in near for count in row["counts"]]
    yield f"{sum(counts)} of {len(counts)} counts"


def of_cost(rows):
    """Numbers of an exact and of an estimated decomposition, — if it was not computed."""
    for tokens in sorted({row["tokens"] for row in rows}):
        ways = [next((r for r in rows if (r["tokens"], r["way"]) == (tokens, way)), None) for way in WAYS]
        seconds = [f"{way['core_seconds']:.1f}" if way else "—" for way in ways]
        memory = [f"{way['mib']:,.0f}" if way else "—" for way in ways]
        value, _, low, high = ways[1]["effective_rank"]
        width = (high - low) / 2 / value
        yield f"| {tokens:,} | {' | '.join(seconds + memory)} | ±{100 * width:.1f} % |"


def of_coverage(rows):
    for row in rows:
        shares = " | ".join(f"{100 * share:.1f}" for share in row["held"].values())
        width = 100 * row["effective_rank_half_width"]
        yield f"| {row['kind']} | {row['heads']} | {shares} | ±{width:.1f} % |"


PAGES = {
    "state_space": ("evidence/speed", of_state_space),
    "monitor": ("how-to/monitor", of_monitor),
    "skip": ("evidence/speed", of_skip),
    "tssa": ("evidence/speed", of_tssa),
    "ranks_1024": ("decisions/004-fast-ranks", of_rank),
    "estimate": ("evidence/speed", of_estimate),
    "estimate_cost": ("evidence/speed", of_cost),
    "estimate_coverage": ("evidence/speed", of_coverage),
}


@pytest.mark.parametrize("name", PAGES)
def test_numbers_on_pages_equal_the_kept_results(name):
    page, wanted = PAGES[name]
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub(r"×(?= \|)", "", " ".join(text.split()))
    assert [words for words in wanted(KEPT[name]["rows"]) if words not in text] == []
