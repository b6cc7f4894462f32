"""The benchmark: it runs, checks its answers, and finds the crossover."""

import itertools
import json
import time
from contextlib import nullcontext

import pytest
import torch
import typer
from typer.testing import CliRunner

from rankwise.cli import bench
from rankwise.errors import InputError
from rankwise.ops.tssa.bench import clock, run
from rankwise.ops.tssa.bench.clock import race
from rankwise.ops.tssa.bench.contenders import EAGER, OURS, REFERENCE, SDPA, contenders, inputs
from rankwise.ops.tssa.bench.memory import kept, peak_bytes, status_kib
from rankwise.ops.tssa.bench.run import crossover

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

    medians = race({name: named(name) for name in "ab"}, CPU, repeats=2)
    assert "".join(order) == "abab" + "aabb" + "bbaa"  # twice to warm up; then one call and a timed one
    assert all(taken >= clock.ENOUGH for taken in medians.values())


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
        run, "race", lambda runs, *_, keep=True: seen.append(keep) or dict.fromkeys(runs, 1.0)
    )
    list(run.sizes((8,), "cpu", torch.float32, repeats=1, memory=False))
    assert seen == [True, False] * 4


def test_a_short_call_is_repeated_until_it_can_be_read():
    calls = itertools.count()
    seconds = race({"a": lambda: next(calls)}, CPU, repeats=1)["a"]
    assert next(calls) > 20
    assert 0 < seconds < clock.ENOUGH


def test_peak_memory_is_of_the_call():
    found = peak_bytes(lambda: torch.ones(32 << 20, dtype=torch.uint8).sum(), CPU)
    assert found is None or found > 30 << 20


def test_freed_memory_stays_while_it_is_kept_and_then_goes():
    with kept() as most:
        pass  # nothing is left of the tests before
    if not most:
        pytest.skip("glibc only")
    assert most >= 25 << 20
    before = status_kib("VmRSS")
    with kept():
        tensors = [torch.ones(25 << 20, dtype=torch.uint8) for _ in range(8)]
        del tensors
        assert status_kib("VmRSS") > before + (190 << 10)
    assert status_kib("VmRSS") < before + (50 << 10)


def app():
    made = typer.Typer()
    made.command()(bench.command)
    return made


def test_the_command_writes_numbers_and_a_picture(tmp_path):
    out, plot = tmp_path / "t.json", tmp_path / "t.html"
    options = ["tssa", "--quick", "--tokens", "64,16", "--out", str(out), "--plot", str(plot)]
    done = CliRunner().invoke(app(), options)
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert [row["tokens"] for row in report["rows"]] == [16, 64] * 4
    assert all(row["right"] and row["error"][OURS] < 1e-5 for row in report["rows"])
    with kept() as limit:
        pass
    both = {OURS, EAGER} if limit else set()
    assert all(set(row["milliseconds_refetching"]) == both for row in report["rows"])
    assert {step["state_bytes"][OURS] for step in report["decoding"]} == {4 * (2 * 12 * 64 + 12) + 8}
    assert "crossover" in plot.read_text() or set(report["crossovers"].values()) == {None}
    assert "rankwise" in done.output
    assert done.output.count("memory not kept: eager") == (len(report["rows"]) if limit else 0)


@pytest.mark.parametrize("backward", [False, True], ids=["output", "gradient"])
def test_a_wrong_kernel_ends_the_benchmark_with_status_1(monkeypatch, tmp_path, backward):
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
    done = CliRunner().invoke(app(), ["tssa", "--quick", "--tokens", "16", "--out", str(out)])
    assert done.exit_code == 1
    assert [row["right"] for row in json.loads(out.read_text())["rows"]] == [backward, False] * 2
    assert "WRONG" in done.output


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["tsssa"], "Did you mean tssa"),
        (["tssa", "--dtype", "int8"], "a floating-point type, got int8"),
        (["tssa", "--device", "tpu"], "a device that is there"),
        (["tssa", "--tokens", "12,x"], "whole numbers above 0, got 12,x"),
    ],
)
def test_what_it_refuses(options, match):
    done = CliRunner().invoke(app(), options)
    assert isinstance(done.exception, InputError)
    assert match in str(done.exception)
