"""A model larger than memory: bytes read from the disk, memory and time of an audit.

    python -m benchmarks offload

Makes a random Llama-shaped model in shards (6.28 GB: six layers of Llama 3 8B in float32), audits it with
`--device-map auto --offload-folder` in a control group of 3 GB, and deletes it. A row is wrong if the disk
is read more than 1.2 times the weights, loading included, or if memory other than cached files exceeds the
limit. `--quick` makes a small model, sets no limit, and compares the audit with one in memory. Without the
right to make control groups, no limit is set, and all weights stay on the disk.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import in_fresh_process, positive
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from rankwise.cli.audit_job import AuditJob, run_job
from rankwise.cli.load_model import demo_model, demo_text

REPEATS = 1
LARGE = {"layers": 6, "hidden": 4096, "inner": 14_336, "heads": 32, "key_heads": 8, "words": 32_000}
SMALL = {"layers": 2, "hidden": 64, "inner": 96, "heads": 4, "key_heads": 2, "words": 300}
GROUPS = (("memory/", "memory.limit_in_bytes"), ("", "memory.max"))
"""Where the kernel keeps control groups, versions 1 and 2, and their files of limits."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--tokens", type=positive, default=1024)
    parser.add_argument("--sequences", type=positive, default=4)
    parser.add_argument("--limit", type=float, default=3.0, help="GB of the control group")


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of an audit with weights on the disk; for a small model also compare it."""
    shape = SMALL if given.quick else LARGE
    tokens = 32 if given.quick else given.tokens
    with tempfile.TemporaryDirectory(dir=".") as folder:
        weights = make(Path(folder), **shape)
        job = {"folder": folder, "tokens": tokens, "sequences": given.sequences}
        row = in_fresh_process("offload", limit=0 if given.quick else given.limit * 1e9, **job)
        ranks = row.pop("ranks")
        if given.quick:
            row["same"] = in_fresh_process("offload", in_memory=True, **job)["ranks"] == ranks
    row |= {"weights": weights, "tokens": tokens, "sequences": given.sequences}
    fits = row["read"] <= 1.2 * weights and row["memory"] <= (row["limit"] or float("inf"))
    yield row | {"right": row.get("same", fits)}


def line(row: dict[str, Any]) -> str:
    """Return the bytes and the time as text."""
    sizes = {name: f"{row[name] / 1e9:.2f} GB" for name in ("weights", "limit", "read", "memory")}
    return f"{sizes}, {row['core_seconds']:.0f} core seconds"


def make(
    folder: Path, *, layers: int, hidden: int, inner: int, heads: int, key_heads: int, words: int
) -> int:
    """Write a random model, a shard for each layer, and return the bytes of its weights."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=words, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    generator, places, total = torch.Generator().manual_seed(0), dict[str, str](), 0
    for part, inside in groupby(names, key=lambda name: ".".join(name.split(".")[:3])):
        shard = {
            name: torch.randn(names[name], generator=generator) * 0.02
            if len(names[name]) > 1
            else torch.ones(names[name])
            for name in inside
        }
        save_file(shard, folder / f"{part}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(shard, f"{part}.safetensors")
        total += sum(4 * weight.numel() for weight in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def peak(
    folder: str, tokens: int, sequences: int, limit: float = 0, in_memory: bool = False
) -> dict[str, Any]:
    """Audit a model in this process, in a control group with a limit; return bytes, seconds and ranks."""
    torch.set_num_threads(1)
    group = None
    for place, name in GROUPS if limit else ():
        with suppress(OSError):
            path = Path("/sys/fs/cgroup", place, f"rankwise-{os.getpid()}")
            path.mkdir()
            (path / name).write_text(str(int(limit)))
            (path / "cgroup.procs").write_text(str(os.getpid()))
            group = path
            break
    for file in Path(folder).glob("*.safetensors"):
        with file.open() as shard:
            os.fsync(shard.fileno())
            os.posix_fadvise(shard.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # drop it from the file cache
    memory = [0]
    places = "auto" if group else '{"": "disk"}'
    spread: dict[str, Any] = {"device_map": places, "offload_folder": Path(folder, "offload")}
    job = AuditJob(
        model=folder, text=demo_text(), tokenizer=str(demo_model()), tokens=tokens, sequences=sequences,
        batch_size=sequences, **({} if in_memory else spread),
    )  # fmt: skip
    begun, before = time.process_time(), number("/proc/self/io", "read_bytes")
    audit = run_job(job, lambda step, done: memory.append(1024 * number("/proc/self/status", "RssAnon")))
    if group is not None:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
    return {
        "limit": limit if group else 0,
        "read": number("/proc/self/io", "read_bytes") - before,
        "memory": max(memory),
        "core_seconds": time.process_time() - begun,
        "ranks": [head.effective_rank for head in audit.heads],
    }


def number(file: str, field: str) -> int:
    """Return a number that the kernel keeps about this process."""
    found = (line for line in Path(file).read_text().splitlines() if line.startswith(field))
    return int(next(found).split()[1])
