"""The monitor as a callback of Lightning; if Lightning is missing, an error names the package."""

import csv
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import History
from rankwise.errors import InputError

INSTALLED = find_spec("lightning") is not None or find_spec("pytorch_lightning") is not None


PACKAGE = (
    import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")
    if INSTALLED
    else None
)
Base: Any = PACKAGE.LightningModule if PACKAGE else nn.Module


class Trained(Base):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.automatic_optimization, self.count = optimizers == 1, optimizers

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def training_step(self, batch: Tensor, at: int) -> Tensor:
        loss = self(batch).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = [self] if self.count == 1 else self.encoder.layers
        return [torch.optim.SGD(part.parameters(), 0.1) for part in parts]


def fit(monitor: rw.RankMonitor, model: nn.Module, folder: Path, **options: Any) -> int:
    assert PACKAGE is not None
    trainer = PACKAGE.Trainer(
        **{"max_steps": 5, "logger": False} | options, accelerator="cpu", default_root_dir=folder,
        callbacks=[monitor.lightning()],
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(10, 10, 8), batch_size=2))
    return int(trainer.global_step)


@pytest.mark.extra
@pytest.mark.skipif(not INSTALLED, reason="Lightning is not installed")
def test_several_optimizers_count_a_batch_several_times(tmp_path: Path) -> None:
    monitor = rw.RankMonitor(torch.randn(2, 10, 8), every=3)
    assert fit(monitor, Trained(optimizers=2), tmp_path, max_steps=10) == 10
    assert monitor.history.steps == [0, 4, 8]


@pytest.mark.extra
@pytest.mark.skipif(not INSTALLED, reason="Lightning is not installed")
def test_processes_that_lightning_spawns_have_copies_of_the_monitor(tmp_path: Path) -> None:
    monitor = rw.RankMonitor(torch.randn(2, 10, 8), every=2, folder=tmp_path / "rank")
    fit(monitor, Trained(), tmp_path, strategy="ddp_spawn", devices=2, max_steps=2)
    assert History.load(tmp_path / "rank").steps == [0, 2]


@pytest.mark.skipif(INSTALLED, reason="Lightning is installed")
def test_the_error_names_lightning_if_it_is_not_installed():
    with pytest.raises(InputError, match="pip install lightning"):
        rw.RankMonitor(torch.randn(1, 5, 8)).lightning()


@pytest.mark.extra
@pytest.mark.skipif(not INSTALLED, reason="Lightning is not installed")
def test_lightning_audits_logs_and_stops(tmp_path):
    class Headless(Base):
        def __init__(self) -> None:
            super().__init__()
            self.net = Trained().encoder

    with pytest.raises(rw.RankwiseError, match='missing the required "forward"'):
        rw.audit(Headless().eval(), [torch.ones(2, 10, 8)])

    logger = PACKAGE.loggers.CSVLogger(tmp_path)
    monitor = rw.RankMonitor(torch.randn(2, 10, 8), every=2, folder=tmp_path / "rank")
    assert fit(monitor, Trained(), tmp_path, logger=logger) == 5
    logger.save()
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert [row["step"] for row in rows if row["rank/heads_effective_rank/encoder.layers.01"]] == [
        "0",
        "2",
        "4",
    ]
    assert monitor.history.steps == [0, 2, 4]
    assert (tmp_path / "rank" / "index.html").is_file()

    collapsed = Trained()
    with torch.no_grad():  # every token gets a multiple of the mean
        for layer in collapsed.encoder.layers:
            layer.self_attn.in_proj_weight[:16] = 0
            layer.self_attn.out_proj.weight *= 1000
    before = [weight.clone() for weight in collapsed.parameters()]
    monitor = rw.RankMonitor(torch.randn(2, 10, 8), every=1, stop_on=("CONSTANT",))
    assert fit(monitor, collapsed, tmp_path) == 0
    assert monitor.stopped_by is not None
    assert all(map(torch.equal, before, collapsed.parameters()))
