"""Errors of `tssa`: subject, expected value, actual value, fix."""

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from tests.unchecked import unchecked

from rankwise.errors import InputError, ShapeError
from rankwise.ops import TSSAState, dispatch, half_lives, tssa

W, TAU = torch.ones(2, 4, 3, 5), torch.ones(3)
BIAS = torch.zeros(3, 4)
STATE = TSSAState(*(torch.zeros(2, 3, 5) for _ in range(2)), torch.zeros(2, 3), torch.zeros(2).long())
# fmt: off
REFUSED: list[tuple[type[Exception], dict, str]] = [
    (ShapeError, {"w": torch.ones(2, 0, 3, 5)}, "at least one row"),
    (ShapeError, {"w": W[0]}, r"w: expected \(B, T, H, K\)"),
    (ShapeError, {"w": W.long()}, "w: expected torch.float16 or"),
    (InputError, {"w": W.tolist()}, "w: expected a tensor"),
    (InputError, {"w": W.to_sparse()}, "w: expected a dense tensor.*to_dense"),
    (ShapeError, {"temperature": torch.ones(3, 1)}, r"temperature: expected \(3,\)"),
    (ShapeError, {"temperature": TAU + 0j}, "temperature: expected real numbers"),
    (InputError, {"temperature": None}, "temperature: expected a tensor"),
    (ShapeError, {"mask": torch.ones(2, 4)}, "mask: expected torch.bool"),
    (ShapeError, {"mask": torch.ones(2, 5, dtype=torch.bool)}, r"mask: expected \(2, 4\)"),
    (ShapeError, {"bias": torch.zeros(3, 3)}, "bias: expected at least 4 positions.*half-lives"),
    (ShapeError, {"bias": BIAS, "state": STATE._replace(seen=torch.arange(0, 3, 2))}, "at least 6"),
    (ShapeError, {"bias": torch.zeros(3, 4, 1)}, r"bias: expected \(3, P\)"),
    (ShapeError, {"bias": torch.zeros(2, 4)}, r"bias: expected \(3, P\)"),
    (InputError, {"bias": BIAS, "causal": False}, "bias with causal=False"),
    (ShapeError, {"state": TSSAState(*(x[:1] for x in STATE))}, r"state.energy: expected \(2, 3, 5\)"),
    (ShapeError, {"state": STATE._replace(seen=torch.zeros(2))}, "state.seen: expected torch.int64"),
    (ShapeError, {"state": STATE._replace(seen=STATE.seen.bool())}, "state.seen: expected torch.int64"),
    (ShapeError, {"state": STATE._replace(mass=STATE.mass.long())}, "state.mass: expected torch.float"),
    (ShapeError, {"state": STATE._replace(mass=TAU.repeat(2, 1) + 0j)}, "state.mass: expected torch.float"),
    (InputError, {"state": tuple(STATE)}, r"state: expected a TSSAState, got tuple"),
    (InputError, {"state": STATE._replace(seen=[0, 0])}, "state.seen: expected a tensor"),
    (InputError, {"state": STATE, "half_life": TAU, "causal": False}, "state and half_life with"),
    (ShapeError, {"half_life": torch.ones(2)}, r"half_life: expected \(3,\)"),
    (ShapeError, {"half_life": TAU + 0j}, "half_life: expected real numbers"),
    (InputError, {"half_life": torch.ones(3, requires_grad=True)}, "half_life: expected constants"),
    (InputError, {"half_life": torch.tensor([1.0, 0.0, 2.0])}, "half_life.*numbers above 0"),
    (InputError, {"half_life": [1, 2, 3]}, "half_life: expected a tensor.*torch.as_tensor"),
    (InputError, {"impl": "refernce"}, "impl: .*Did you mean reference"),
    (InputError, {"impl": "cuda"}, "impl: expected one of auto, reference, cpu, triton"),
]
# fmt: on


@pytest.mark.parametrize(("error", "change", "match"), REFUSED, ids=[row[2] for row in REFUSED])
def test_arguments_that_do_not_fit_are_refused(error, change, match):
    with unchecked(), pytest.raises(error, match=match):
        tssa(**({"w": W, "temperature": TAU, "causal": True} | change))


INF = float("inf")


@pytest.mark.parametrize("ladder", [(0, 1, 2), (3, 0, 2), (3, 5, 2), (2, 1, INF)])
def test_half_lives_that_do_not_rise_are_refused(ladder):
    with pytest.raises(InputError, match="half_lives"):
        half_lives(*ladder)


def test_a_ladder_rises_from_end_to_end():
    ladder = half_lives(4, 2, 512)
    assert ladder[[0, 3]].tolist() == pytest.approx([2, 512])
    assert (ladder.log().diff().diff().abs() < 1e-9).all()
    assert half_lives(1).tolist() == [4.0]


@pytest.fixture
def forget_imports():
    """Forget which packages can be imported, now and after `monkeypatch` has restored them."""
    yield dispatch.import_failure.cache_clear
    dispatch.import_failure.cache_clear()


def test_an_explicit_choice_never_falls_back(forget_imports, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu = torch.device("cuda")
    with pytest.raises(InputError, match=r'impl="cpu": expected tensors on a CPU, got tensors on cuda'):
        dispatch.choose("cpu", gpu)
    monkeypatch.setitem(sys.modules, "triton", None)
    forget_imports()
    with pytest.raises(InputError, match=r"an installed triton, got no triton .*pip install 'triton'"):
        dispatch.choose("triton", gpu)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    forget_imports()
    with pytest.raises(InputError, match="tensors on a GPU, or TRITON_INTERPRET=1 set, got tensors on cpu"):
        dispatch.choose("triton", torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "missing", "chosen"),
    [
        ("cpu", "triton", "cpu"),
        ("cpu", "numba", "reference"),
        ("cpu", "llvmlite", "reference"),
        ("cuda", "numba", "triton"),
        ("cuda", "triton", "reference"),
        ("mps", None, "reference"),
    ],
)
def test_the_rule_of_auto(device, missing, chosen, forget_imports, monkeypatch):
    for name in ("numba", "llvmlite", "triton"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else ModuleType(name))
    forget_imports()
    assert dispatch.choose("auto", torch.device(device)) == chosen
    assert dispatch.choose("reference", torch.device(device)) == "reference"


WITHOUT_NUMBA = """
import sys
import torch
from rankwise.errors import InputError
from rankwise.ops import tssa
w = torch.randn(1, 9, 3, 4, requires_grad=True)
for causal in (False, True):
    results = [tssa(w, torch.ones(3), causal, impl=impl).output for impl in ("auto", "reference")]
    assert torch.equal(*results)
    results[0].sum().backward()
try:
    tssa(w, torch.ones(3), impl="cpu")
except InputError as error:
    print(error)
assert not [name for name in sys.modules if name.startswith("rankwise.ops") and ".cpu" in name]
"""


def test_without_numba_auto_is_the_reference_and_cpu_says_what_to_install(tmp_path):
    """Here numba is installed, but cannot load its library."""
    (tmp_path / "numba.py").write_text("raise OSError('no libllvmlite.so')", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", WITHOUT_NUMBA]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith('impl="cpu": expected an installed numba, got no numba that can be imported')
    assert "OSError: no libllvmlite.so" in line
    assert "pip install 'rankwise[cpu]'" in line


@pytest.mark.parametrize("name", ["temperature", "mask", "bias", "state"])
def test_tensors_on_another_device_are_refused(name):
    given = {"temperature": TAU, "mask": torch.ones(2, 4).bool(), "bias": torch.ones(3, 9), "state": STATE}
    tssa(W, causal=True, **given)
    moved = TSSAState(*(x.to("meta") for x in STATE)) if name == "state" else given[name].to("meta")
    with pytest.raises(InputError, match=rf"^{name}.*: expected a tensor on cpu, like w"):
        tssa(W, causal=True, **(given | {name: moved}))
