"""One of two processes that run the same commands, one after the other.

Run by ``python -m torch.distributed.run`` as ``process_worker.py FOLDER``: reads ``FOLDER/commands.json``,
command lines by name, and writes status and output of each to ``FOLDER/RANK.json``.
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from rankwise.cli import main


def split() -> nn.Module:
    """A model by a tensor-parallel plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaModel

    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaModel(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)).eval()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {f"layers.0.{name}": ColwiseParallel() for name in columns}
    plan |= {f"layers.0.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def replicated() -> nn.Module:
    """A model that waits for the other process."""
    return nn.parallel.DistributedDataParallel(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))


def drawn() -> tuple[nn.Module, object]:
    """A model whose weights are others in each process."""
    torch.manual_seed(int(os.environ["RANK"]))
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), [torch.randn(1, 9, 8)] * 4


def sharded() -> nn.Module:
    """A model whose weights are gathered from both processes while it runs."""
    return fully_shard(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))


def compiled() -> tuple[nn.Module, object]:
    """A compiled model with batches."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    return torch.compile(model, backend="eager"), list(torch.randn(4, 1, 9, 8))


def failing() -> tuple[nn.Module, object]:
    """A model with batches; the second batch of the second process fails."""

    def batches() -> object:
        torch.manual_seed(0)
        for number in range(5):
            if number == 3:
                raise OSError("no such shard")
            yield torch.randn(1, 9, 8)

    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    return model, batches() if os.environ["RANK"] == "1" else [torch.randn(1, 9, 8)] * 4


def told(arguments: list[str]) -> dict[str, object]:
    """Status, output and errors of a command."""
    sys.argv = ["rankwise", *arguments]
    out, errors, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            main()
        except SystemExit as leaving:
            status = leaving.code
    return {"status": status, "out": out.getvalue(), "errors": errors.getvalue()}


def run(folder: Path) -> None:
    """Run the commands in one process group, because a second group cannot be created."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    commands = json.loads((folder / "commands.json").read_text(encoding="utf-8"))
    said = {name: told(arguments) for name, arguments in commands.items()}
    path = folder / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(said), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
