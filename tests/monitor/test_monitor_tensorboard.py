"""TensorBoard receives the losses of a Trainer and the numbers of its monitor."""

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from rankwise.models import ToSTConfig, ToSTForCausalLM
from rankwise.monitor import RankMonitor, logged_numbers

pytest.importorskip("accelerate")
pytest.importorskip("tensorboard")


@pytest.mark.extra
def test_losses_and_ranks_are_in_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    config = ToSTConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8,
        layer_types="softmax",
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 11, (12, 8))]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=2, logging_steps=2, use_cpu=True,
        disable_tqdm=True, report_to=["tensorboard"], save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(ToSTForCausalLM(config), arguments, train_dataset=rows)
    monitor = RankMonitor({"input_ids": rows[0]["input_ids"][None]}, every=3)
    monitor.attach(trainer)
    trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    # event files hold float32
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    losses = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars("train/loss")]
    assert logged == losses
    assert list(monitor.history.steps) == [0, 3, 6]
    for step, audit in zip(monitor.history.steps, monitor.history.audits, strict=True):
        for name, value in logged_numbers(audit).items():
            drawn = {event.step: event.value for event in events.Scalars(f"train/{name}")}
            assert drawn[step] == pytest.approx(value, rel=1e-6), name
