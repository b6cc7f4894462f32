"""The benchmark: it runs, checks its answers, and finds the crossover."""

import itertools
import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from benchmarks.tssa import clock, run
from benchmarks.tssa.__main__ import main
from benchmarks.tssa.clock import race
from benchmarks.tssa.contenders import EAGER, OURS, REFERENCE, SDPA, contenders, inputs
from benchmarks.tssa.memory import kept
from benchmarks.tssa.run import crossover, errors, right

CPU = torch.device("cpu")


def rows(*points):
    return [{"causal": True, "backward": False, "tokens": t, "times_ours": {SDPA: x}} for t, x in points]


@pytest.mark.parametrize(
    ("points", "length"),
    [
        ([(256, 2.0), (512, 4.0)], 256),
        ([(256, 0.5), (1024, 2.0)], 512),
        ([(256, 0.25), (512, 0.5)], None),
        ([], None),
    ],
)
def test_the_crossover_lies_where_the_ratio_passes_one(points, length):
    found = crossover(rows(*points), causal=True, backward=False)
    assert found == (None if length is None else pytest.approx(length))
    assert crossover(rows(*points), causal=False, backward=False) is None


def test_contenders_of_tssa_agree():
    for causal in (False, True):
        runs = contenders(inputs(20, causal, "cpu", torch.float32, heads=2, width=8))
        torch.testing.assert_close(runs[OURS](), runs[EAGER]())
        torch.testing.assert_close(runs[OURS](), runs[REFERENCE]())
        assert runs[SDPA]().shape == (1, 20, 2, 8)


def test_a_race_gives_every_run_its_rounds():
    order = []

    def named(name):
        def call():
            order.append(name)
            time.sleep(1.2 * clock.ENOUGH)  # long enough to be read off one call

        return call

    readings = race({name: named(name) for name in "ab"}, CPU, repeats=2)
    assert "".join(order) == "abab" + "aabb" + "bbaa"  # twice to warm up; then one call and a timed one
    assert all(min(taken) >= clock.ENOUGH for taken in readings.values())


def test_memory_is_kept_during_a_race_unless_it_is_not_to_be(monkeypatch):
    entered = []
    monkeypatch.setattr(clock, "kept", lambda: entered.append(True) or nullcontext())
    race({"a": lambda: None}, CPU, repeats=1, keep=False)
    assert not entered
    race({"a": lambda: None}, CPU, repeats=1)
    assert entered


def test_each_size_is_raced_with_memory_kept_and_without(monkeypatch):
    with kept() as limit:
        pass
    if not limit:
        pytest.skip("glibc only")
    seen = []
    monkeypatch.setattr(
        run, "race", lambda runs, *_, keep=True: seen.append(keep) or {name: [1.0] for name in runs}
    )
    list(run.sizes((8,), "cpu", torch.float32, repeats=1, memory=False))
    assert seen == [True, False] * 4


def test_a_short_call_is_repeated_until_it_can_be_read():
    calls = itertools.count()
    (seconds,) = race({"a": lambda: next(calls)}, CPU, repeats=1)["a"]
    assert next(calls) > 20
    assert 0 < seconds < clock.ENOUGH


def resident() -> int:
    """KiB of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_freed_memory_stays_while_it_is_kept_and_then_goes():
    with kept() as most:
        pass  # nothing is left of the tests before
    if not most:
        pytest.skip("glibc only")
    assert most >= 25 << 20
    before = resident()
    with kept():
        tensors = [torch.ones(25 << 20, dtype=torch.uint8) for _ in range(8)]
        del tensors
        assert resident() > before + (190 << 10)
    assert resident() < before + (50 << 10)


def test_it_writes_numbers_and_a_picture(tmp_path, capsys):
    out, plot = tmp_path / "t.json", tmp_path / "t.html"
    assert main(["--quick", "--tokens", "64,16", "--out", str(out), "--plot", str(plot)]) == 0
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    assert [row["tokens"] for row in report["rows"]] == [16, 64] * 4
    assert all(row["right"] and row["error"][OURS] < 1e-5 for row in report["rows"])
    with kept() as limit:
        pass
    both = {OURS, EAGER} if limit else set()
    assert all(set(row["milliseconds_refetching"]) == both for row in report["rows"])
    assert {step["state_bytes"][OURS] for step in report["decoding"]} == {4 * (2 * 12 * 64 + 12) + 8}
    assert "crossover" in plot.read_text() or set(report["crossovers"].values()) == {None}
    assert "rankwise" in printed
    assert printed.count("memory not kept: eager") == (len(report["rows"]) if limit else 0)


@pytest.mark.parametrize("entry", [3e-4, 3e-5])
def test_the_gradient_at_an_entry_near_zero_does_not_decide(entry):
    """At a first token s is 1 whatever w is, so its gradient is a difference of two terms of 2/w."""
    x = inputs(256, True, "cpu", torch.float32)
    x.w[0, 0, 3, 5] = entry
    x.w.requires_grad_()
    assert right(errors(x, backward=True), torch.float32)


def test_what_is_wrong_beside_an_entry_near_zero_is_seen(monkeypatch):
    real = contenders

    def wrong(x):
        runs = real(x)
        bend = torch.ones_like(x.w)
        bend[:, 100:] = 1.0001
        return runs | {OURS: lambda: runs[OURS]() * bend}

    x = inputs(256, True, "cpu", torch.float32)
    x.w[0, 0, 3, 5] = 3e-5
    x.w.requires_grad_()
    monkeypatch.setattr(run, "contenders", wrong)
    assert not right(errors(x, backward=True), torch.float32)
    assert not right(errors(x._replace(w=x.w.detach()), backward=False), torch.float32)
    assert not right({OURS: float("nan"), REFERENCE: 1.0}, torch.float32)


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

    def bent(x):
        runs = real(x)
        return runs | {OURS: lambda: Bent.apply(runs[OURS]())}

    monkeypatch.setattr(run, "contenders", bent)
    out = tmp_path / "t.json"
    assert main(["--quick", "--tokens", "16", "--out", str(out)]) == 1
    assert [row["right"] for row in json.loads(out.read_text())["rows"]] == [backward, False] * 2
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--dtype", "int8"], ["--device", "tpu"], ["--tokens", "12,x"], ["--tokens", "0"]], ids=" ".join
)
def test_what_it_refuses(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
    assert wrong[0] in capsys.readouterr().err
