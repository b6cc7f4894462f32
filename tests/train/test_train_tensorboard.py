"""What a training and its monitor give to TensorBoard is in the event file."""

from pathlib import Path

import pytest
from tests.train.tiny import tiny

from rankwise.train import train

pytest.importorskip("accelerate")
pytest.importorskip("tensorboard")


def test_losses_and_ranks_are_in_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    results = train(tiny(tmp_path, model="softmax", monitor=True, monitor_every=3), out)
    (file,) = out.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    # event files hold float32, results five digits
    losses = [[event.step, pytest.approx(event.value, abs=1e-4)] for event in events.Scalars("train/loss")]
    assert losses == results["curve"]
    for step, numbers in results["rank"].items():
        for name, value in numbers.items():
            drawn = {event.step: event.value for event in events.Scalars(f"train/{name}")}
            assert drawn[int(step)] == pytest.approx(value, abs=1e-4), name
    assert sorted(results["rank"]) == ["0", "3", "6"]
