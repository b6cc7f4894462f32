"""A monitor audits its probe at the chosen steps, reports findings and stops training."""

import logging

import pytest
import torch
from tests.support.modules import Average, GivenOperator, sites_of
from tests.unchecked import unchecked
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import History
from rankwise.errors import InputError, RankwiseError
from rankwise.monitor import logged_numbers
from rankwise.monitor.monitor import STOP_AUDITS, STOP_SPREAD
from rankwise.operators import DenseMixing

WIDTH, TOKENS = 16, 10


def collapsing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Average(0.01, width=WIDTH) for _ in range(3)))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def probe(sequences: int = 2) -> Tensor:
    return torch.randn(sequences, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def test_every_second_step_is_audited():
    monitor, model = rw.RankMonitor(probe(), every=2), encoder()
    audits = []
    for step in range(7):
        audits.append(monitor.step(model, step))
        for weight in model.parameters():
            weight.data *= 1.1
    assert [audit is not None for audit in audits] == [True, False] * 3 + [True]
    assert monitor.history.steps == [0, 2, 4, 6]
    assert audits[0].heads[0].effective_rank != audits[6].heads[0].effective_rank
    assert monitor.seconds > 0


@pytest.mark.parametrize(
    ("steps", "audited"),
    [
        (range(0, 25, 3), [0, 12, 24]),
        (range(0, 25, 2), [0, 10, 20]),
        (range(1, 25), [10, 20]),  # loops may count from 1
        ([7, 9, 11, 24], [11, 24]),
        ([20, 21, 35], [20, 35]),
    ],
)
def test_an_audit_is_due_when_every_steps_have_passed_since_the_last(steps, audited):
    monitor, model = rw.RankMonitor(probe(), every=10), encoder()
    assert [step for step in steps if monitor.step(model, step) is not None] == audited


class Failing(nn.Module):
    """Raises on the probe when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.error = encoder(), None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.inner(x)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize("part", ["the model", "`log`", "`on_finding`", "`save`"])
def test_an_error_ends_no_training(part, caplog, tmp_path, monkeypatch):
    raised = []

    def fail(*args, **kwargs):
        if raised:
            raise raised[0]

    name = part.strip("`")
    given = {name: fail} if name in ("log", "on_finding") else {}
    model = collapsing() if name == "on_finding" else Failing()
    for layer in model if name == "on_finding" else []:
        layer.skip = 5.0
    monitor = rw.RankMonitor(probe(), every=2, stop_on="NONFINITE", folder=tmp_path, **given)
    assert monitor.step(model, 0) is not None
    if name == "save":
        monkeypatch.setattr(rw.Audit, "save", lambda *_: (_ for _ in ()).throw(ValueError("no page")))
    for layer in model if name == "on_finding" else []:
        layer.skip = 0.01
    raised.append(OUT_OF_MEMORY)
    model.error = OUT_OF_MEMORY if name == "the model" else None
    with caplog.at_level(logging.WARNING, "rankwise.monitor"):
        assert (monitor.step(model, 2) is None) == (name == "the model")
    assert "raining continues" in caplog.text
    raised.clear()
    model.error = None
    assert monitor.step(model, 3) is None  # a failed audit is not repeated at each step
    assert monitor.step(model, 4) is not None
    assert monitor.history.steps == ([0, 4] if name == "the model" else [0, 2, 4])


def test_a_model_that_fails_at_the_first_call_is_refused():
    model = Failing()
    model.error = ValueError("no such token")
    with pytest.raises(rw.RankwiseError, match="no such token"):
        rw.RankMonitor(probe()).step(model, 0)


@pytest.mark.parametrize(
    "error",
    [
        OUT_OF_MEMORY,
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
)
def test_a_lack_of_memory_ends_no_training_at_the_first_call_either(error, caplog):
    monitor, model = rw.RankMonitor(probe(), every=2, stop_on="NONFINITE"), Failing()
    model.error = error
    assert monitor.step(model, 0) is None
    assert "step 0: no audit, and training continues: `batches`, batch 1" in caplog.text
    model.error = None
    assert monitor.step(model, 2) is not None
    assert monitor.history.steps == [2]


def test_a_lack_of_memory_in_a_measure_ends_no_training(monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("rankwise.auditing.run.measure_heads", fail)
    assert rw.RankMonitor(probe()).step(encoder(), 0) is None
    assert "training continues: measures of" in caplog.text


class Counting(nn.Module):
    """Changes its buffers in evaluation mode, too: in place, by assignment, and saved by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()
        for name in ("calls", "anew", "kept"):
            self.register_buffer(name, torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.anew = self.anew + 1
        return self.inner(x * self.kept)


def test_an_audit_restores_buffers_and_keeps_a_backward_pass_valid():
    model = Counting().train()
    calls, anew = model.calls, model.anew
    loss = model(probe().requires_grad_()).square().mean()
    replaced = model.anew
    assert rw.RankMonitor(probe()).step(model, 0) is not None
    loss.backward()
    assert model.calls is calls
    assert model.anew is replaced
    assert (model.calls.item(), model.anew.item(), anew.item()) == (2, 2, 1)


def test_a_monitor_audits_the_probe_in_evaluation_mode():
    model = encoder().train()
    found = rw.RankMonitor([probe(), probe()]).step(model, 0)
    wanted = rw.audit(model.eval(), [probe(), probe()])
    records = ([one.model_dump_json() for one in (*audit.heads, *audit.states)] for audit in (found, wanted))
    assert next(records) == next(records)


def test_logged_numbers_are_means_over_heads_per_layer():
    audit = rw.audit(encoder().eval(), [probe()])
    named = logged_numbers(audit)
    ranks = [head.effective_rank for head in audit.heads if head.layer == 1]
    assert named["rank/heads_effective_rank/layers.01"] == pytest.approx(sum(ranks) / len(ranks))
    assert named["rank/states_spread/layers.02"] == audit.states[2].spread
    assert named["rank/findings/error"] == 0
    assert all(isinstance(value, float) for value in named.values())
    cross = [head.model_copy(update={"cross": True, "effective_rank": 1.0}) for head in audit.heads]
    both = logged_numbers(audit.model_copy(update={"heads": [*audit.heads, *cross]}))
    assert both["rank/heads_effective_rank/layers.01.cross"] == 1.0
    assert {name: both[name] for name in named} == named


def test_a_probe_is_moved_to_the_device_of_the_model(device):
    found = rw.RankMonitor([probe(), probe()]).step(encoder().to(device), 0)
    assert found is not None
    assert all(head.effective_rank >= 1 for head in found.heads)


def test_a_stop_saves_the_audit(tmp_path, caplog):
    logged: list[tuple[int, dict[str, float]]] = []
    log = lambda values, step: logged.append((step, values))  # noqa: E731
    monitor, model = rw.RankMonitor(probe(), 1, stop_on=["collapse"], folder=tmp_path, log=log), collapsing()
    with caplog.at_level(logging.WARNING, "rankwise.monitor"):
        for step in range(STOP_AUDITS + 1):
            assert monitor.stopped_by is None
            monitor.step(model, step)
    assert monitor.stopped_by is not None
    assert monitor.stopped_by.code == "COLLAPSE"
    assert f"step {STOP_AUDITS}: training stops on COLLAPSE" in caplog.text
    assert rw.Audit.load(tmp_path / f"step-{STOP_AUDITS}").findings[0].code == "COLLAPSE"
    assert logged[0][0] == 0
    assert logged[0][1]["rank/findings/error"] >= 1
    assert monitor.finish() == tmp_path / "index.html"
    assert History.load(tmp_path).steps == [*range(STOP_AUDITS + 1)]


def test_collapse_stops_after_audits_in_a_row_once_and_for_good(caplog):
    monitor, model = rw.RankMonitor(probe(), 1, stop_on=("COLLAPSE",)), collapsing()
    collapsed = [True] * STOP_AUDITS + [False] + [True] * STOP_AUDITS + [False, True]
    with caplog.at_level(logging.ERROR, "rankwise.monitor"):
        for step, now in enumerate(collapsed):
            for layer in model:
                layer.skip = 0.01 if now else 5.0
            found = monitor.step(model, step)
            assert ("COLLAPSE" in {finding.code for finding in found.findings}) == now
            # the audit of step 0 does not count, so that the first row is too short
            assert (monitor.stopped_by is not None) == (step >= 2 * STOP_AUDITS)
    assert caplog.text.count("training stops on COLLAPSE") == 1


def test_a_collapse_from_which_trainings_recover_stops_none():
    monitor, model = rw.RankMonitor(probe(), 1, stop_on="COLLAPSE"), collapsing()
    for layer in model:
        layer.skip = 0.05
    for step in range(STOP_AUDITS + 1):
        [found] = [one for one in monitor.step(model, step).findings if one.code == "COLLAPSE"]
        assert STOP_SPREAD < found.evidence["direction_spread_lowest"] < 0.001
    assert monitor.stopped_by is None


def test_collapses_of_several_stacks_are_not_audits_in_a_row(monkeypatch):
    stacks = iter("aaabab" + "b" * STOP_AUDITS)

    def in_next_stack(*args, **kwargs):
        whole, there = rw.audit(*args, **kwargs), {"stack": next(stacks)}
        found = [
            one.model_copy(update={"where": type(one.where)(**there)})
            for one in whole.findings
            if one.code == "COLLAPSE"
        ]
        layers = [layer.model_copy(update=there) for layer in whole.states]
        return whole.model_copy(update={"findings": found, "states": layers})

    monkeypatch.setattr("rankwise.monitor.monitor.audit", in_next_stack)
    monitor, model = rw.RankMonitor(probe(), 1, stop_on="COLLAPSE"), collapsing()
    for step in range(5 + STOP_AUDITS):
        monitor.step(model, step)
        assert (monitor.stopped_by is None) == (step < 4 + STOP_AUDITS)


def test_another_code_stops_at_its_first_audit():
    monitor = rw.RankMonitor(probe(), 1, stop_on=("CONSTANT",))
    monitor.step(collapsing(), 0)
    assert monitor.stopped_by.code == "CONSTANT"


def test_the_message_of_a_stop_has_the_layer_the_reading_and_an_action(caplog):
    monitor, model = rw.RankMonitor(probe(), 1, stop_on="COLLAPSE"), collapsing()
    with caplog.at_level(logging.ERROR, "rankwise.monitor"):
        for step in range(STOP_AUDITS + 1):
            monitor.step(model, step)
    [line] = [record.getMessage() for record in caplog.records]
    stop = monitor.stopped_by
    assert all(words in line for words in (f"at {stop.place}:", stop.meaning))
    assert f"after {stop.evidence['blocks']:g} blocks" in stop.meaning
    lowest = min(monitor.history.audits[-1].states, key=lambda layer: layer.direction_spread)
    rule = f"{STOP_AUDITS} audits in a row below {STOP_SPREAD:g}, the last with {lowest.direction_spread:.2g}"
    assert f"{rule} after {lowest.blocks} blocks" in line
    code = line.split("`")[1]
    advised = eval(code, {"rw": rw, "monitor": monitor, "model": model})
    assert advised.findings[0].remedy.words.startswith("raise λ in the config")
    assert f"at the lowest {stop.evidence['direction_spread_lowest']:.2g}" in line


def test_a_limit_on_the_largest_logit_stops_a_training(caplog):
    """The loss of this training rewards large weights of queries and keys in the second layer."""
    model, limit = encoder(), 100.0
    grown = model.layers[1].self_attn.in_proj_weight
    optimizer, stop = torch.optim.SGD(model.parameters(), 0.1), f"largest_logit > {limit}"
    monitor = rw.RankMonitor(probe(), every=2, stop_on=("NONFINITE", stop))
    with caplog.at_level(logging.ERROR, "rankwise.monitor"):
        for step in range(100):
            monitor.step(model, step)
            if monitor.stopped_by is not None:
                break
            loss = (model(probe()) - probe()).square().mean() - grown[: 2 * WIDTH].square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    *before, last = [[head.largest_logit for head in audit.heads] for audit in monitor.history.audits]
    assert len(before) > 2
    assert max(map(max, before)) <= limit < max(last)
    stopped = monitor.stopped_by
    assert stopped.code == "LARGEST_LOGIT"
    [head] = [head for head in monitor.history.audits[-1].heads if head.id == stopped.where]
    assert stopped.evidence == {"largest_logit": max(last), "limit": limit}
    assert head.largest_logit == max(last)
    [line] = [record.getMessage() for record in caplog.records]
    assert f"step {step}: training stops on LARGEST_LOGIT, at {stopped.place}: " in line
    assert f"layer {head.layer} head {head.head}" in stopped.place
    count = f"{sum(logit > limit for logit in last)} of {len(last)}"
    assert f"logit is {max(last):.4g}, above 100. Heads above this limit: {count}." in line
    logged = logged_numbers(monitor.history.audits[-1])
    assert logged["rank/heads_largest_logit/layers.01"] == max(last)
    assert logged["rank/heads_query_norm/layers.01"] > 3 * logged["rank/heads_query_norm/layers.00"] > 0
    assert {name.partition("/layers")[0] for name in logged} >= {"rank/heads_key_norm"}


def test_a_limit_on_logits_of_a_model_without_logits_is_refused():
    sites = sites_of(DenseMixing(torch.eye(TOKENS).expand(2, 1, -1, -1)))
    monitor = rw.RankMonitor(probe(), stop_on="largest_logit > 100", sites=sites)
    with pytest.raises(InputError, match="`stop_on`: expected a model with softmax attention, got no head"):
        monitor.step(GivenOperator(), 0)
    model = encoder()
    model.layers[0].self_attn.in_proj_weight.data[0] = torch.nan
    assert rw.RankMonitor(probe(), stop_on="largest_logit > 100").step(model, 0) is not None


def test_findings_of_a_code_are_reported_on_one_line(caplog, monkeypatch):
    one, *_ = rw.audit(collapsing().eval(), [probe()]).findings
    sink, there = one.model_copy(update={"code": "SINK"}), {"where": type(one.where)(stack="", layer=2)}
    many = [one, sink, one.model_copy(update=there), sink.model_copy(update=there), sink]
    many += [one.model_copy(update={"code": "CONSTANT", "severity": "info"})]

    def with_many(*args, **kwargs):
        return rw.audit(*args, **kwargs).model_copy(update={"findings": many})

    found = []
    monkeypatch.setattr("rankwise.monitor.monitor.audit", with_many)
    monitor = rw.RankMonitor(probe(), 1, on_finding=lambda step, finding: found.append(finding))
    with caplog.at_level(logging.WARNING, "rankwise.monitor"):
        monitor.step(collapsing(), 0)
    assert found == many
    assert [record.getMessage() for record in caplog.records] == [
        f"step 0: COLLAPSE at {one.place} and 1 more: {one.meaning}",
        f"step 0: SINK at {sink.place} and 2 more: {one.meaning}",
    ]


def test_a_finding_is_reported_once_while_it_remains(caplog):
    found = []
    monitor = rw.RankMonitor(probe(), 1, on_finding=lambda step, finding: found.append((step, finding.code)))
    model = collapsing()
    with caplog.at_level(logging.WARNING, "rankwise.monitor"):
        for step in range(3):
            monitor.step(model, step)
    assert [step for step, code in found if code == "COLLAPSE"] == [0]
    assert caplog.text.count("COLLAPSE") == 1
    assert monitor.stopped_by is None


def test_ctrl_c_during_an_audit_interrupts_training():
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder()

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            raise KeyboardInterrupt

    monitor = rw.RankMonitor(probe())
    model = Interrupted().train()
    with pytest.raises(KeyboardInterrupt):
        monitor.step(model, 0)
    assert model.inner.layers[0].training
    assert not len(monitor.history)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"probe": "text"}, "`probe`"),
        ({"probe": []}, "`probe`"),
        ({"probe": torch.randn(0, 5, WIDTH)}, r"`probe`: expected at least one sequence.*got .*\(0, 5, "),
        ({"probe": {}}, "`probe`: expected at least one tensor.* got a dict without tensors"),
        ({"probe": ()}, "`probe`: expected at least one tensor"),
        ({"probe": [probe(), {"a": 1}]}, "`probe`: expected at least one tensor"),
        ({"every": 0}, "`every`"),
        ({"every": 1.5}, "`every`"),
        ({"every": True}, "`every`"),
        ({"stop_on": ["COLAPSE"]}, "COLLAPSE"),
        ({"stop_on": 3}, "code 3"),
        ({"stop_on": "largest_logits > 100"}, "expected .*largest_logit.*got .*largest_logits"),
        ({"stop_on": "effective_rank > 3"}, "measure in `stop_on`.*expected .*largest_logit"),
        ({"stop_on": ["COLLAPSE", "largest_logit < 100"]}, "measure in `stop_on`"),
        ({"stop_on": "largest_logit > many"}, 'limit in `stop_on`.*Write "largest_logit > 100"'),
        ({"stop_on": "largest_logit >"}, "limit in `stop_on`"),
        ({"stop_on": "largest_logit > -1"}, "limit in `stop_on`.*got -1"),
        ({"stop_on": "largest_logit > inf"}, "limit in `stop_on`.*got inf"),
        ({"stop_on": "largest_logit > nan"}, "limit in `stop_on`.*got nan"),
        ({"stop_on": "largest_logit"}, "largest_logit"),
        ({"log": "wandb"}, "`log`"),
    ],
)
def test_wrong_settings_are_refused_before_training(settings, named):
    with unchecked(), pytest.raises(RankwiseError, match=named):
        rw.RankMonitor(**{"probe": probe()} | settings)


@pytest.mark.parametrize("step", ["0", None, 0.0, -1])
def test_a_step_must_be_an_integer(step):
    monitor = rw.RankMonitor(probe())
    with unchecked(), pytest.raises(InputError, match=r"`step`: expected a whole number"):
        monitor.step(encoder(), step)


def test_a_probe_may_be_nested_and_is_copied():
    mine = torch.randn(1, 5, WIDTH)
    before = mine.clone()
    (kept,) = rw.RankMonitor(({"x": mine},)).batches
    monitor, model = rw.RankMonitor(mine, every=1), nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
    first = monitor.step(model, 0)
    mine.zero_()
    again = monitor.step(model, 1)
    assert torch.equal(kept[0]["x"], before)
    assert [head.row_entropy for head in again.heads] == [head.row_entropy for head in first.heads]


def test_a_model_without_a_mixer_is_refused_at_its_first_step(tmp_path):
    with pytest.raises(rw.RankwiseError, match="mixing operator"):
        rw.RankMonitor(probe(), folder=tmp_path).step(nn.Linear(WIDTH, WIDTH), 0)
