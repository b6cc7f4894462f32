"""Benchmarks run, compare runs within rounds, and exit with status 1 if an answer is wrong."""

import itertools
import json
import random
import time

import benchmarks.__main__ as command
import pytest
import torch
from benchmarks import harness, language, state_space, tssa
from benchmarks.harness import in_fresh_process, peak_mib, race, ratio
from benchmarks.tssa import EAGER, OURS, REFERENCE, SDPA, contenders, crossover, errors, inputs, is_right

CPU = torch.device("cpu")


def test_every_run_of_a_race_has_its_rounds():
    order = []

    def named(name):
        def call():
            order.append(name)
            time.sleep(1.2 * harness.MIN_READING)  # one call is a reading

        return call

    seconds = race({name: named(name) for name in "ab"}, 2, CPU, time.perf_counter)
    assert "".join(order) == "abab" + "aabb" + "bbaa"  # two calls to warm up, then untimed and timed calls
    assert all(min(times) >= harness.MIN_READING for times in seconds.values())


def test_a_short_call_is_repeated_within_a_reading():
    calls = itertools.count()
    (seconds,) = race({"a": lambda: next(calls)}, 1, CPU)["a"]
    assert next(calls) > 20
    assert 0 < seconds < harness.MIN_READING


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
    out, threads = tmp_path / "out.json", torch.get_num_threads()
    size = {"tssa": ["--tokens", "64", "16"], "rank": ["--tokens", "32"]}.get(name, [])
    try:
        assert command.main([name, "--quick", "--repeats", "1", "--out", str(out), *size]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(out.read_text())
    assert list(report) == ["machine", "command", "settings", "rows"]
    assert report["rows"]
    assert all(row.get("right", True) for row in report["rows"])
    assert len(capsys.readouterr().out.splitlines()) > len(report["rows"])
    if name == "tssa":
        assert [row["tokens"] for row in report["rows"][:-2]] == [16, 64] * 4
        assert {row["state_bytes"][OURS] for row in report["rows"][-2:]} == {4 * (2 * 12 * 64 + 12) + 8}


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


@pytest.mark.parametrize("name", ["rank", "tssa"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_missing_is_one_line(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([name, "--device", "cuda"])
    assert "--device cuda: expected a device that torch sees" in capsys.readouterr().err.splitlines()[-1]
