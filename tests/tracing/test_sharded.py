"""Models split over two processes are refused unless each process runs whole layers."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.errors import CaptureError

WORKER = Path(__file__).with_name("sharded_worker.py")


SPLIT = {
    "torch_plan": "layers.0.self_attn.q_proj ((Shard(dim=0),)",
    "transformers_plan": "the model itself (tp_size 2)",
    "plan_under_fsdp": "layers.0.self_attn.q_proj",
    "layers_apart": "the model itself (pp_size 2)",
}
"""Ways to split layers, and what their errors name."""


def captured(folder: Path) -> list[dict[str, dict]]:
    """Results of capture in each of two processes, by the way in which the model was split."""
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(folder)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in running:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


def test_a_model_whose_layers_are_split_is_refused_in_every_process_and_others_are_captured(tmp_path) -> None:
    for process in captured(tmp_path):
        for way, named in SPLIT.items():
            assert named in process[way].get("error", ""), process[way]
            assert "`device_map=`" in process[way]["error"]
        # calls on parts of heads are left out with the reason
        assert "DTensor" in process["split_calls"].get("error", "nothing")
        for way in ("sharded", "replicated"):
            assert process[way] == process["whole"]
            assert process[way]["heads"] == [4, 4]
            assert process[way]["uncaptured"] == []


@pytest.mark.parametrize("size", [1, 2])
def test_a_split_into_plain_tensors_is_known_from_attributes_of_transformers(size) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    layer.linear1._hf_tp_plan, layer.linear1._hf_device_mesh = "colwise", SimpleNamespace(size=lambda: size)
    expected = pytest.raises(CaptureError, match=r"linear1 \(colwise\)") if size == 2 else nullcontext()
    with torch.no_grad(), expected, rw.capture(layer):
        layer(torch.randn(1, 3, 8))
