"""One of two processes that capture the same small Llama, split in each of several ways.

Run as ``python sharded_worker.py RANK 2 FOLDER``; writes the results of all captures to ``FOLDER/RANK.json``.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.distributed import DistributedConfig

import rankwise as rw
from rankwise.errors import CaptureError

CONFIG = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 4}
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
PLAN = {f"layers.{layer}.{name}": ColwiseParallel() for layer in (0, 1) for name in COLUMNS}
PLAN |= {
    f"layers.{layer}.{name}": RowwiseParallel()
    for layer in (0, 1)
    for name in ("self_attn.o_proj", "mlp.down_proj")
}


def whole(folder: Path) -> nn.Module:
    """Return the model that each process holds without a split."""
    torch.manual_seed(0)
    return LlamaModel(LlamaConfig(**CONFIG)).eval()


def saved(folder: Path) -> Path:
    """Return the folder of the saved model, once the first process has written it."""
    if dist.get_rank() == 0:
        whole(folder).save_pretrained(folder / "llama")
    dist.barrier()
    return folder / "llama"


def torch_plan(folder: Path) -> nn.Module:
    """Split by torch's `parallelize_module`."""
    return parallelize_module(whole(folder), init_device_mesh("cpu", (2,)), PLAN)


def transformers_plan(folder: Path) -> nn.Module:
    """Split by transformers while it loads."""
    plan = DistributedConfig(tp_size=2)
    return LlamaModel.from_pretrained(saved(folder), distributed_config=plan).eval()


def layers_apart(folder: Path) -> nn.Module:
    """Each process runs some of the layers."""
    plan = DistributedConfig(pp_size=2)
    return LlamaForCausalLM.from_pretrained(saved(folder), distributed_config=plan).eval()


def plan_under_fsdp(folder: Path) -> nn.Module:
    """Split by torch, then sharded again over another axis of the mesh."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(whole(folder), mesh["tensor"], PLAN)
    return fully_shard(model, mesh=mesh["data"])


def sharded(folder: Path) -> nn.Module:
    """FSDP: each layer is gathered before it runs."""
    model = whole(folder)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def replicated(folder: Path) -> nn.Module:
    """DDP: each process has the whole model."""
    return nn.parallel.DistributedDataParallel(whole(folder))


def split_calls(folder: Path) -> nn.Module:
    """No parameter is split: the model splits its heads as it runs."""
    mesh = init_device_mesh("cpu", (2,))

    class Split(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(0)
            local = torch.randn(3, 2, 2, input_ids.shape[1], 4)
            q, k, v = (DTensor.from_local(one, mesh, [Shard(1)], run_check=False) for one in local)
            with sdpa_kernel(SDPBackend.MATH):  # DTensor takes 14 s to place the outputs of another backend
                out = nn.functional.scaled_dot_product_attention(q, k, v)
            return out.redistribute(placements=[Replicate()]).to_local()

    return Split()


WAYS = (torch_plan, transformers_plan, plan_under_fsdp, layers_apart, split_calls, whole, sharded, replicated)


def sums(matrices: torch.Tensor) -> list[float]:
    """Return the sum of squares of each head in this process."""
    here = matrices.to_local() if isinstance(matrices, DTensor) else matrices
    return here.double().square().sum((0, 2, 3)).tolist()


def seen(model: nn.Module) -> dict[str, object]:
    """Capture one call; return the error, or sizes and sums of the matrices."""
    tokens = torch.arange(14).reshape(2, 7)
    try:
        with torch.no_grad(), rw.capture(model) as trace:
            model(input_ids=tokens)
    except CaptureError as error:
        return {"error": str(error)}
    return {
        "heads": [site.operator.shape[1] for site in trace.mixers],
        "sums": [sums(site.operator.dense()) for site in trace.mixers],
        "uncaptured": [module.name for module in trace.uncaptured],
        "states": [tuple(state.tokens.shape) for state in trace.states],
    }


def main() -> None:
    """Capture the model split in each way."""
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    results = {}
    for way in WAYS:
        results[way.__name__] = seen(way(folder))
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
