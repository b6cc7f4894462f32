"""The monitor as a callback of Lightning; if Lightning is missing, an error names the package."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import AuditError
from rankwise.errors import InputError

INSTALLED = find_spec("lightning") is not None or find_spec("pytorch_lightning") is not None


@pytest.mark.skipif(INSTALLED, reason="Lightning is installed")
def test_the_error_names_lightning_if_it_is_not_installed():
    with pytest.raises(InputError, match="pip install lightning"):
        rw.RankMonitor(torch.randn(1, 5, 8)).lightning()


@pytest.mark.extra
@pytest.mark.skipif(not INSTALLED, reason="Lightning is not installed")
def test_lightning_audits_logs_and_stops(tmp_path):
    from importlib import import_module

    package = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")

    class Trained(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x)

        def training_step(self, batch: Tensor, at: int) -> Tensor:
            return self(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Headless(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Trained().encoder

    with pytest.raises(AuditError, match=r"define `forward`.*model\.net"):
        rw.audit(Headless().eval(), [torch.ones(2, 10, 8)])

    def fit(monitor: rw.RankMonitor, model: nn.Module) -> int:
        trainer = package.Trainer(
            max_steps=5, accelerator="cpu", default_root_dir=tmp_path, callbacks=[monitor.lightning()],
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(10, 10, 8), batch_size=2))
        return trainer.global_step

    monitor = rw.RankMonitor(torch.randn(2, 10, 8), every=2, folder=tmp_path / "rank")
    assert fit(monitor, Trained()) == 5
    assert monitor.history.steps == [0, 2, 4]
    assert (tmp_path / "rank" / "index.html").is_file()

    collapsed = Trained()
    with torch.no_grad():  # every token gets a multiple of the mean
        for layer in collapsed.encoder.layers:
            layer.self_attn.in_proj_weight[:16] = 0
            layer.self_attn.out_proj.weight *= 1000
    before = [weight.clone() for weight in collapsed.parameters()]
    monitor = rw.RankMonitor(torch.randn(2, 10, 8), every=1, stop_on=("COLLAPSE",))
    assert fit(monitor, collapsed) == 0
    assert monitor.stopped_by is not None
    assert all(map(torch.equal, before, collapsed.parameters()))
