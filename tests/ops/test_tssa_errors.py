"""Errors of `tssa`: subject, expected value, actual value, fix."""

import operator
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from tests.unchecked import unchecked

import rankwise
from rankwise.errors import InputError, ShapeError
from rankwise.ops import TSSAState, dispatch, half_lives, tssa

W, TAU = torch.ones(2, 4, 3, 5), torch.ones(3)
ROW = torch.ones(1, 4, 3, 5)
STATE = TSSAState.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bias": torch.zeros(3, 3)}, r"bias: expected at least 4 positions.* got 3\. .*half-lives"),
        (
            {"bias": torch.zeros(3, 4), "state": STATE._replace(seen=torch.tensor([0, 2]))},
            "at least 6 positions",
        ),
        ({"state": TSSAState.zeros(1, 3, 5)}, r"state\.energy: expected \(2, 3, 5\), got \(1, 3, 5\)"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "one packed row, got .* 2 rows"),
        ({"w": ROW, "cu_seqlens": torch.tensor([0, 3])}, r"rising from 0 to 4, got \[0, 3\]"),
        ({"w": ROW, "cu_seqlens": torch.tensor([0, 3, 2, 4])}, "rising from 0 to 4"),
        (
            {"state": STATE._replace(seen=torch.zeros(2))},
            r"state\.seen: expected torch\.int64 or torch\.int32, got torch\.float32",
        ),
        (
            {"state": STATE._replace(seen=STATE.seen.bool())},
            r"state\.seen: expected torch\.int64 .* got torch\.bool",
        ),
        (
            {"state": STATE._replace(mass=torch.zeros(2, 3).long())},
            r"state\.mass: expected torch\.float16 or .*float64, got torch\.int64",
        ),
        (
            {"state": STATE._replace(mass=torch.zeros(2, 3, dtype=torch.cfloat))},
            r"state\.mass: expected torch\.float16 or .*float64, got torch\.complex64",
        ),
        ({"temperature": TAU + 0j}, r"temperature: expected real numbers, got torch\.complex64"),
        ({"half_life": TAU + 0j}, r"half_life: expected real numbers, got torch\.complex64"),
        ({"w": torch.ones(2, 0, 3, 5)}, "at least one row"),
        ({"w": W[0]}, r"w: expected \(B, T, H, K\), got \(4, 3, 5\)"),
        ({"w": W.long()}, r"w: expected torch\.float16 or .*float64, got torch\.int64"),
        ({"temperature": torch.ones(3, 1)}, r"temperature: expected \(3,\), got \(3, 1\)"),
        ({"mask": torch.ones(2, 4)}, r"mask: expected torch\.bool, got torch\.float32"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, r"mask: expected \(2, 4\).* got \(2, 5\)"),
        ({"bias": torch.zeros(3, 4, 1)}, r"bias: expected \(3, P\), got \(3, 4, 1\)"),
        ({"bias": torch.zeros(2, 4)}, r"bias: expected \(3, P\), got \(2, 4\)"),
        ({"half_life": torch.ones(2)}, r"half_life: expected \(3,\), got \(2,\)"),
        ({"w": ROW, "cu_seqlens": torch.tensor([0.0, 4.0])}, r"integers .* got \(2,\), torch\.float32"),
        ({"w": ROW, "cu_seqlens": torch.tensor([4])}, r"\(N \+ 1,\) integers .* got \(1,\)"),
    ],
)
def test_shapes_that_do_not_fit(change, match):
    with unchecked(), pytest.raises(ShapeError, match=match):
        tssa(**({"w": W, "temperature": TAU, "causal": True} | change))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"causal": False, "bias": torch.zeros(3, 4)}, "bias with causal=False: expected causal=True"),
        (
            {"causal": False, "state": STATE, "half_life": torch.ones(3)},
            "state and half_life with causal=False",
        ),
        ({"membership": "unifrom"}, "Did you mean uniform"),
        ({"membership": "uniform", "bias": torch.zeros(3, 4)}, "bias with membership='uniform'"),
        ({"half_life": torch.ones(3, requires_grad=True)}, "half_life: expected constants"),
        ({"half_life": torch.tensor([1.0, 0.0, 2.0])}, "numbers above 0, got 0"),
        ({"half_life": [1, 2, 3]}, r"half_life: expected a tensor, got list\. Pass torch\.as_tensor"),
        ({"temperature": None}, r"temperature: expected a tensor .* got None\. .*membership='uniform'"),
        ({"w": W.tolist()}, "w: expected a tensor, got list"),
        ({"w": W.to_sparse()}, r"w: expected a dense tensor, got torch\.sparse_coo\. .*to_dense"),
        ({"w": ROW, "cu_seqlens": [0, 4]}, "cu_seqlens: expected a tensor, got list"),
        (
            {"state": tuple(STATE)},
            r"state: expected a TSSAState, got tuple\. Make one with TSSAState\(\*state\)",
        ),
        ({"state": STATE._replace(seen=[0, 0])}, r"state\.seen: expected a tensor, got list"),
        (
            {"state": STATE._replace(seen=torch.tensor([3, -1]))},
            r"state\.seen: expected .* from 0 on, got -1",
        ),
        ({"impl": "refernce"}, "impl: .*Did you mean reference"),
        ({"impl": "cuda"}, "expected one of auto, reference, cpu, triton, got 'cuda'"),
    ],
)
def test_options_that_contradict(change, match):
    with unchecked(), pytest.raises(InputError, match=match):
        tssa(**({"w": W, "temperature": TAU, "causal": True} | change))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_uniform_memberships_need_no_temperature(causal, impl):
    w = torch.randn(2, 4, 3, 5)
    with_one, without = (tssa(w, tau, causal, impl=impl, membership="uniform").output for tau in (TAU, None))
    assert torch.equal(with_one, without)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"w": W.long()}, "Float"),
        ({"temperature": torch.ones(3, 1)}, "Float"),
        ({"mask": torch.ones(2, 4)}, "Bool"),
    ],
)
def test_wrong_kinds_are_also_caught_by_the_shape_types(changes, match):
    with pytest.raises(Exception, match=match):
        tssa(**({"w": W, "temperature": TAU} | changes))


INF = float("inf")


@pytest.mark.parametrize(
    "ladder", [(0, 1, 2, 0), (3, 0, 2, 0), (3, 5, 2, 0), (3, 1, 2, 4), (3, 1, 2, -1), (2, 1, INF, 0)]
)
def test_ladders_that_are_none(ladder):
    with pytest.raises(InputError, match="half_lives"):
        half_lives(*ladder)


def test_a_ladder_rises_from_end_to_end():
    ladder = half_lives(6, 2, 512, infinite=2)
    assert ladder[[0, 3]].tolist() == pytest.approx([2, 512])
    assert (ladder[4:] == torch.inf).all()
    assert (ladder[:4].log().diff().diff().abs() < 1e-9).all()
    assert half_lives(1).tolist() == [4.0]


@pytest.fixture
def forget_imports():
    """What was found out about packages is kept: forget it now, and when `monkeypatch` has put them back."""
    yield dispatch._failure.cache_clear
    dispatch._failure.cache_clear()


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


def test_the_rule_is_where_the_docstring_says():
    named = re.search(r"`rankwise\.(ops\.\S+)` is the\s+rule", rankwise.ops.tssa.__doc__)[1]
    assert operator.attrgetter(named)(rankwise) is dispatch.choose


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
from rankwise.models import ToSTConfig
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="torch is loaded once, and forked for either way")
def test_without_numba_auto_is_the_reference_and_cpu_says_what_to_install(tmp_path):
    """Where it is not installed, and where it is installed, but cannot load its library."""
    (tmp_path / "numba.py").write_text("raise OSError('no libllvmlite.so')", encoding="utf-8")
    missing, broken = "sys.modules['numba'] = None", f"sys.path.insert(0, {str(tmp_path)!r})"
    program = f"""
import os, sys, torch
assert not [name for name in sys.modules if name.startswith(("numba", "rankwise"))]
for begin in ({missing!r}, {broken!r}):
    child = os.fork()
    if child == 0:
        exec(begin)
        exec({WITHOUT_NUMBA!r})
        sys.stdout.flush()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, begin
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2
    for line, why in zip(said, ("ModuleNotFoundError", "OSError: no libllvmlite.so"), strict=True):
        assert line.startswith('impl="cpu": expected an installed numba, got no numba that can be imported')
        assert why in line
        assert "pip install 'rankwise[cpu]'" in line


@pytest.mark.parametrize("name", ["temperature", "mask", "bias", "state"])
def test_tensors_on_another_device_are_refused(name):
    w = torch.randn(1, 5, 2, 3)
    given = {
        "temperature": torch.ones(2),
        "causal": name in ("bias", "state"),
        "mask": torch.ones(1, 5, dtype=torch.bool),
        "bias": torch.ones(2, 9) if name == "bias" else None,
        "state": TSSAState.zeros(1, 2, 3) if name == "state" else None,
    }
    moved = TSSAState.zeros(1, 2, 3, device="meta") if name == "state" else given[name].to("meta")
    tssa(w, **given)
    with pytest.raises(
        InputError, match=rf"^{name}.*: expected a tensor on cpu, like w, got a tensor on meta"
    ):
        tssa(w, **(given | {name: moved}))
