"""The monitor as a callback of transformers' Trainer logs, trains the same bits and stops."""

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

import rankwise as rw
from rankwise.auditing import History

accelerate: Any = pytest.importorskip("accelerate")


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=40, max_position_embeddings=32, **sizes))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 40, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(model: BertForMaskedLM, folder: str, *, disable_tqdm: bool = True) -> Trainer:
    settings = TrainingArguments(
        folder, max_steps=5, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=disable_tqdm, save_strategy="no", logging_steps=1, weight_decay=0.1,
    )  # fmt: skip
    return Trainer(model, settings, train_dataset=rows(10))


def probe() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack([row["input_ids"] for row in rows(2)])}


def test_the_trainer_logs_numbers_and_trains_the_same_bits(tmp_path):
    alone = trainer_of(bert(), str(tmp_path))
    alone.train()
    watched = trainer_of(bert(), str(tmp_path))
    monitor = rw.RankMonitor(probe(), every=2, folder=tmp_path / "rank", stop_on="largest_logit > 1e9")
    monitor.attach(watched)
    watched.train()
    pairs = zip(watched.model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert monitor.history.steps == [0, 2, 4]
    logged = {
        row["step"]: row for row in watched.state.log_history if any(k.startswith("rank/heads") for k in row)
    }
    assert sorted(logged) == [0, 2, 4]
    losses = [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (watched, alone)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5
    assert any(name.startswith("rank/states_spread/") for name in logged[4])
    assert any(name.startswith("rank/heads_largest_logit/") for name in logged[4])
    assert (tmp_path / "rank" / "index.html").is_file()


@pytest.mark.parametrize("has_no_bar", [True, False], ids=["printer", "progress"])
def test_numbers_of_layers_are_for_loggers_and_not_for_the_console(tmp_path, capfd, has_no_bar):
    logged: list[str] = []

    class Logger(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.extend(logs)

    trainer = trainer_of(bert(), str(tmp_path), disable_tqdm=has_no_bar)
    trainer.add_callback(Logger())
    rw.RankMonitor(probe(), every=2).attach(trainer)
    trainer.train()
    printed = "".join(capfd.readouterr())
    assert sum(name.startswith("rank/") for name in logged) > 20
    assert "rank/" not in printed
    assert printed.count("'loss'") == 5


@pytest.mark.parametrize("scaled", [False, True])
def test_the_trainer_stops_on_a_finding(tmp_path, scaled):
    """A loss scaler needs its gradients, so the step that the trainer counts is taken."""
    model = bert()
    with torch.no_grad():  # every token gets a multiple of the mean
        for name, weight in model.named_parameters():
            if "attention.self.query" in name:
                weight.zero_()
            if "attention.self.value.weight" in name or "attention.output.dense.weight" in name:
                weight *= 50
    trainer = trainer_of(model, str(tmp_path))
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu") if scaled else None
    monitor = rw.RankMonitor(probe(), every=1, stop_on=("CONSTANT",))
    monitor.attach(trainer)
    before = [weight.clone() for weight in model.parameters()]
    trainer.train()
    assert monitor.stopped_by is not None
    assert monitor.history.steps[0] == 0
    assert trainer.state.global_step == 1, "the trainer stops at the end of a step"
    assert all(map(torch.equal, before, model.parameters())) != scaled


def test_a_training_that_starts_again_with_smaller_batches_is_audited(tmp_path, monkeypatch):
    """An out-of-memory error at the third step starts training again from step 0."""
    monkeypatch.setattr(accelerate.utils.memory, "clear_device_cache", lambda **_: None)
    trainer, tried = trainer_of(bert(), str(tmp_path)), []
    trainer.args.auto_find_batch_size = True
    step = trainer.training_step

    def training_step(*args, **kwargs):
        tried.append(trainer.state.global_step)
        if len(tried) == 3:
            raise RuntimeError("CUDA out of memory.")
        return step(*args, **kwargs)

    monkeypatch.setattr(trainer, "training_step", training_step)
    monitor = rw.RankMonitor(probe(), every=2, folder=tmp_path / "rank")
    monitor.attach(trainer)
    trainer.train()
    assert trainer.state.global_step == 5
    assert tried[:4] == [0, 1, 2, 0]
    assert monitor.history.steps == History.load(tmp_path / "rank").steps == [0, 2, 4]


def test_a_callback_that_fails_on_the_numbers_of_the_monitor_ends_no_training(tmp_path, caplog):
    class ReadsTheLoss(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            assert "train_runtime" in logs or logs["loss"] > 0

    trainer = trainer_of(bert(), str(tmp_path))
    trainer.add_callback(ReadsTheLoss())
    every = list(trainer.callback_handler.callbacks)
    monitor = rw.RankMonitor(probe(), every=2)
    callback = monitor.attach(trainer)
    trainer.train()
    assert trainer.state.global_step == 5
    assert monitor.history.steps == [0, 2, 4]
    assert trainer.callback_handler.callbacks == [*every, callback]
    assert "training continues" in caplog.text
