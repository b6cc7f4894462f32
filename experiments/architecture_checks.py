"""One model type of transformers, tiny and random: what capture and λ-skips make of it."""

import re
import time
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import rankwise as rw
from experiments.family_checks import tensors
from experiments.guessed_inputs import fed
from experiments.tiny_architectures import builds
from rankwise._internals.torch_private import forward_hooks, forward_pre_hooks

ATTENTION_LIKE = re.compile(
    r"Attention|Attn|Mixer|Mamba|SSM|S4D|Retention|Hyena|RWKV|Rwkv|Delta|LRU|Lru|ShortConv|FourierTransform"
    r"|Correlation|LSTM|GRU|RNN"
)
"""Classes of modules that may mix tokens, by name: wider than what capture goes by."""
NO_MIXER = re.compile(
    r"(Output|Norm|Mask|Embeddings?|Bias|Pool(ing|er)|Mlp|MLP|FeedForward|Block|Layer|Model|Encoder|Decoder|Head"
    r"|Patchify|Scaler)$"
)
CLOSE = 1e-4
"""Softmaxes of float32 scores of size ≤ 40 by two kernels: some hundred roundings of 6e-8, tenfold."""
Entry = dict[str, Any]


def check_architecture(model_type: str) -> Entry:
    """Build one model type, run it, and compare it with itself under capture and with λ-skips."""
    start, entry = time.perf_counter(), Entry(ran=False)
    try:
        model, batch, size = _running(model_type)
    except Exception as error:
        return entry | {"why": _first_line(error)}
    entry |= {"ran": True, "model": type(model).__name__, "size": size, "inputs": sorted(batch)}
    entry |= _captured(model, batch)
    entry |= _skips(model, batch)
    return entry | {"seconds": round(time.perf_counter() - start, 1)}


def _running(model_type: str) -> tuple[nn.Module, dict[str, Tensor], str]:
    """A model of this type and a batch that it takes."""
    first: Exception | None = None
    for size, model in builds(model_type):
        batch, error = fed(model)
        if error is None:
            return model, batch, size
        first = first or error
    raise first or RuntimeError("it is not built")


@torch.no_grad()
def _run(model: nn.Module, batch: dict[str, Any], **settings: Any) -> Any:
    torch.manual_seed(2)  # some models draw noise
    return model(**batch, **settings)


def _captured(model: nn.Module, batch: dict[str, Tensor]) -> Entry:
    """What capture sees, and whether it changes anything."""
    with _called(model) as called:
        alone = tensors(_run(model, batch))
    watched: list[Tensor] = []
    refused: Entry = {}
    try:
        with rw.capture(model) as trace:
            watched = tensors(_run(model, batch))
    except rw.RankwiseError as error:  # no mixer was seen: the trace says of which modules
        refused = {"capture_why": _first_line(error)}
    seen = {site.name for site in trace.mixers}
    left = {one.name: one for one in trace.uncaptured if one.name in called}
    silent = {
        type(module).__name__
        for name, module in called.items()
        if _attention_like(module) and not any(_related(name, other) for other in (*seen, *left))
    }
    return {
        "identical": _same(alone, watched),
        "captured": len(seen),
        "there": len(seen) + len(left),
        "kinds": sorted({site.kind for site in trace.mixers}),
        "uncaptured": {one.type: one.reason for one in left.values()},
        "silent": sorted(silent),
        **refused,
        **_told(model, batch, trace),
    }


def _told(model: nn.Module, batch: dict[str, Tensor], trace: rw.Trace) -> Entry:
    """How many of the matrices in `output_attentions` of the eager model are among those captured."""
    captured = [site.operator.dense() for site in trace.mixers]
    entry: Entry = {"told": None, "equal": None}
    for made in (_switched, _twin):  # some models build another class of attention when they are made eager
        try:
            output = _run(made(model), batch, output_attentions=True)
        except Exception as error:
            entry.setdefault("told_why", _first_line(error))
            continue
        told = [
            matrix
            for name, value in output.items()
            if "attentions" in name
            for matrix in tensors(value)
            if matrix.dim() == 4
        ]
        equal = sum(any(_close(one, matrix) for one in captured) for matrix in told)
        if entry["equal"] is None or equal > entry["equal"]:
            entry = {"told": len(told), "equal": equal}
        if equal == len(told):
            break
    return entry


def _switched(model: nn.Module) -> nn.Module:
    """The model itself, told to compute its attention step by step."""
    model.set_attn_implementation("eager")
    return model


def _twin(model: nn.Module) -> nn.Module:
    """A model of the same weights, built to compute its attention step by step."""
    twin: nn.Module = type(model)._from_config(model.config, attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def _skips(model: nn.Module, batch: dict[str, Tensor]) -> Entry:
    """Whether λ-skips at λ = 1 change nothing and come out again."""
    before, names = tensors(_run(model, batch)), list(model.state_dict())
    hooks = _hooks(model)
    try:
        skips = rw.add_lambda_skip(model, example=batch)
    except Exception as error:
        return {"skips": 0, "skips_why": _first_line(error)}
    no_op = _same(tensors(_run(model, batch)), before)
    rw.remove_lambda_skip(model)
    undone = _same(tensors(_run(model, batch)), before) and list(model.state_dict()) == names
    return {"skips": len(skips), "no_op": no_op, "undone": undone and _hooks(model) == hooks}


def _hooks(model: nn.Module) -> int:
    return sum(len(forward_hooks(module)) + len(forward_pre_hooks(module)) for module in model.modules())


@contextmanager
def _called(model: nn.Module) -> Any:
    """The modules that are called until the block ends, by name."""
    names, called = {id(module): name for name, module in model.named_modules()}, {}

    def note(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            called[names[id(module)]] = module

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        handle.remove()


def _attention_like(module: nn.Module) -> bool:
    name = type(module).__name__
    return bool(ATTENTION_LIKE.search(name)) and not NO_MIXER.search(name)


def _related(one: str, other: str) -> bool:
    """Whether one module is the other, or in it, or around it; "" is the model."""
    return not one or not other or f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit by bit; what is not a number on both sides is the same."""
    return len(one) == len(other) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(one, other, strict=True)
    )


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= CLOSE)


def _first_line(error: Exception) -> str:
    text = re.sub(
        r"/\S*/site-packages/", "", " ".join(str(error).split())
    )  # whose machine it was is no result
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
