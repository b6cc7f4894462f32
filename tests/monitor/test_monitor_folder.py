"""The folder of a monitor contains one training, and a full disk does not stop training."""

import logging
import pickle
from pathlib import Path

import pytest
from tests.monitor.test_monitor import collapsing, encoder, probe

import rankwise as rw
from rankwise.auditing import History
from rankwise.errors import InputError


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list whose entry tells if the disk is full."""
    state, write = [False], Path.write_text

    def limited(path: Path, *args: object, **kwargs: object) -> int:
        if state[0]:
            raise OSError(28, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", limited)
    return state


def test_a_full_disk_causes_one_warning_and_training_continues(tmp_path, caplog, full):
    monitor, model = rw.RankMonitor(probe(), every=1, folder=tmp_path), encoder()
    with caplog.at_level(logging.WARNING, "rankwise.monitor"):
        for step in range(3):
            full[0] = step > 0
            assert monitor.step(model, step) is not None
        assert monitor.history.steps == [0, 1, 2]
        assert caplog.text.count("could not be written") == 1
        assert str(tmp_path) in caplog.text
        assert "No space left on device" in caplog.text
        assert monitor.finish() is None
        assert "the history could not be written" in caplog.text
    full[0] = False
    assert monitor.finish() == tmp_path / "index.html"
    assert History.load(tmp_path).steps == [0, 1, 2]


def test_a_stop_on_a_full_disk_names_the_unsaved_audit(tmp_path, caplog, full):
    monitor, full[0] = rw.RankMonitor(probe(), stop_on="CONSTANT", folder=tmp_path), True
    with caplog.at_level(logging.ERROR, "rankwise.monitor"):
        monitor.step(collapsing(), 0)
    assert monitor.stopped_by.code == "CONSTANT"
    assert "stops on CONSTANT; audit not saved (No space left on device) in" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused_at_the_first_step(tmp_path):
    (tmp_path / "rank").write_text("a file")
    with pytest.raises(InputError, match=r"`folder` .*rank: expected a folder that can be written"):
        rw.RankMonitor(probe(), folder=tmp_path / "rank").step(encoder(), 0)


def test_steps_that_begin_again_are_not_audited_and_lose_no_audit(tmp_path, caplog):
    monitor, model = rw.RankMonitor(probe(), every=2, folder=tmp_path), encoder()
    for _ in range(3):
        audited = [monitor.step(model, step) is not None for step in (0, 0, 1, 2, 3)]  # hooks may call twice
    assert audited == [False] * 5
    assert monitor.step(model, 4) is not None
    assert monitor.history.steps == History.load(tmp_path).steps == [0, 2, 4]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("training goes back to step 0: the next audit is at step 4. Count steps over all")


def test_a_folder_contains_one_training(tmp_path):
    model = encoder()
    first = rw.RankMonitor(probe(), every=1, folder=tmp_path)
    for step in range(4):
        first.step(model, step)
    with pytest.raises(InputError, match=r"got step-0, step-1, step-2, step-3.*resume=True"):
        rw.RankMonitor(probe(), folder=tmp_path).step(model, 0)
    again = rw.RankMonitor(probe(), every=2, folder=tmp_path, resume=True)
    assert again.step(model, 2) is not None  # the checkpoint of step 2
    assert again.history.steps == [0, 1, 2]
    assert History.load(tmp_path).steps == [0, 1, 2]
    anew = rw.RankMonitor(probe(), folder=tmp_path, resume=True)
    anew.step(model, 0)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0"]


def test_a_copy_of_a_monitor_continues(tmp_path):
    model = encoder()
    monitor = rw.RankMonitor(probe(), every=2, folder=tmp_path)
    monitor.step(model, 0)
    monitor.step(model, 2)
    twin = pickle.loads(pickle.dumps(monitor))
    assert twin.step(model, 3) is None
    assert twin.step(model, 4) is not None
    assert twin.history.steps == [0, 2, 4]
