"""Parallel matrices: the same bits for any number of threads, and the settings of the caller are restored."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tests.measures.measure_cases import normal

import rankwise as rw
from rankwise._internals.threads import exclusive, map_threads, one_thread
from rankwise.auditing.measure import measure_heads, sampled
from rankwise.measures import compute_measures, estimate_spectrum, rank_summary
from rankwise.tracing import CapturedMixer


@pytest.fixture(autouse=True)
def _settings():
    """Restore the number of torch's threads after each test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_results_are_in_order_and_torch_sets_the_number_of_threads():
    torch.set_num_threads(3)
    meet = threading.Barrier(3, timeout=20)  # broken unless three threads run together

    def work(item: int) -> tuple[int, int, str]:
        meet.wait()
        return item, torch.get_num_threads(), threading.current_thread().name

    answers = map_threads(work, range(6))
    assert [item for item, _, _ in answers] == list(range(6))
    assert {count for _, count, _ in answers} == {1}
    assert len({name for _, _, name in answers}) == 3
    assert torch.get_num_threads() == 3


def test_at_once_bounds_the_number_of_calls_under_way():
    torch.set_num_threads(8)
    lock, now, most = threading.Lock(), 0, 0

    def work(_: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    map_threads(work, range(12), at_once=2)
    assert most == 2


def test_a_single_call_at_a_time_keeps_all_threads():
    torch.set_num_threads(2)
    seen = [(2, threading.current_thread().name)] * 2

    def work(_: int) -> tuple[int, str]:
        return torch.get_num_threads(), threading.current_thread().name

    assert map_threads(work, range(2), at_once=1) == seen
    with one_thread():
        assert torch.get_num_threads() == 1
        assert map_threads(work, range(2), at_once=1) == seen
        assert torch.get_num_threads() == 1


def test_nested_maps_run_one_by_one():
    torch.set_num_threads(2)

    def inner(_: int) -> str:
        return threading.current_thread().name

    def outer(_: int) -> bool:
        return set(map_threads(inner, range(4))) == {threading.current_thread().name}

    assert map_threads(outer, range(4)) == [True] * 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_settings_are_restored_after_an_error(error):
    torch.set_num_threads(2)
    done = []

    def work(item: int) -> None:
        if item == 1:
            raise error("here")
        time.sleep(0.005)
        done.append(item)

    with pytest.raises(error):
        map_threads(work, range(200))
    assert torch.get_num_threads() == 2
    assert len(done) < 199  # calls that had not begun were dropped
    torch.set_num_threads(1)
    with pytest.raises(error):
        map_threads(work, range(3))
    assert torch.get_num_threads() == 1


def test_gradient_and_inference_modes_are_passed_to_threads():
    torch.set_num_threads(2)

    def modes(_: int) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert set(map_threads(modes, range(4))) == {(True, False)}
    with torch.no_grad():
        assert set(map_threads(modes, range(4))) == {(False, False)}
    with torch.inference_mode():
        assert set(map_threads(modes, range(4))) == {(False, True)}
        assert rank_summary(torch.rand(40, 100, 100)).effective_rank.shape == (40,)


MEASURES = {
    "ranks": lambda operator: rank_summary(operator),
    "rows": lambda operator: compute_measures(
        ["row_entropy", "row_spread", "head_distance"], operator
    ).values(),
    "estimate": lambda operator: estimate_spectrum(operator, 8, 6).count(0.1),
    "collapse": lambda operator: [rw.measures.spread(operator.dense()[:, 0])],
}


def site(tokens: int) -> CapturedMixer:
    operator = rw.operators.SoftmaxMixing(normal(3, 4, tokens, 8), normal(3, 4, tokens, 8, seed=1))
    valid = torch.ones(3, tokens, dtype=torch.bool)
    valid[2, tokens // 2 :] = False
    return CapturedMixer("attention", 0, "softmax", operator, valid, valid, sequences=3, stack="layers")


def records(tokens):
    return [one.model_dump_json() for one in measure_heads(*sampled(site(tokens)), 0.01, "auto").to_records()]


def numbers(measure, tokens):
    query, key = normal(3, 4, tokens, 8), normal(3, 4, tokens, 8, seed=1)
    return [one.numpy().tobytes() for one in measure(rw.operators.SoftmaxMixing(query, key, is_causal=True))]


CASES = {
    f"{name}, {tokens} tokens": partial(numbers, measure, tokens)
    for name, measure in MEASURES.items()
    for tokens in (20, 150)
} | {"records of heads": partial(records, 120)}


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_number_of_threads(case):
    seen = []
    for count in (1, 2, 8):
        torch.set_num_threads(count)
        with one_thread():  # as audits measure
            seen.append(CASES[case]())
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_can_measure():
    torch.set_num_threads(2)
    matrices = normal(40, 100, 100)
    expected = rank_summary(matrices).effective_rank.sum().item()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if rank_summary(matrices).effective_rank.sum().item() == expected else 2
        finally:
            os._exit(status)
    for _ in range(600):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert pid, "the child waits for ever"
    assert os.waitstatus_to_exitcode(status) == 0


def in_threads(*work):
    """Return the results of functions, each called in a thread of its own at the same time."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(function) for function in work]]


def test_one_model_is_used_by_one_thread_and_other_models_in_parallel():
    inside, most, meet = [], [], threading.Barrier(2, timeout=20)

    @exclusive
    def use(model, wait=False):
        inside.append(model)
        most.append(len(inside))
        if wait:
            meet.wait()  # broken unless two threads are inside
        time.sleep(0.01)
        inside.remove(model)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    in_threads(*(partial(use, part) for part in (model, model[0], model, model[0])))
    assert max(most) == 1
    kept, model[0] = model[0], torch.nn.Linear(2, 2)  # as a change of the model does
    in_threads(*(partial(use, part) for part in (model, model, kept)))
    assert max(most) <= 2
    in_threads(*(partial(use, torch.nn.Linear(2, 2), wait=True) for _ in range(2)))
    assert exclusive(exclusive(len))([1]) == 1, "a thread may enter again, also without a model"


def test_certificates_and_audits_of_one_model_in_threads_are_those_of_one_thread():
    model, batch = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    certify, audit = partial(rw.certify_skip, model, batch), partial(rw.audit, model, [batch])
    certificate, heads = certify(), audit().heads
    made = in_threads(certify, audit, certify, audit, certify)
    assert made[::2] == [certificate] * 3
    assert [str(result.heads) for result in made[1::2]] == [str(heads)] * 2
