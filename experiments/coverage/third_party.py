"""Capture sees the mixers of models from other packages as matrices computed by hand from their weights.

Each model is built tiny with random float32 weights; nothing is downloaded. Hooks of torch record what each
mixing layer reads. From this and the weights of the layer its matrix is computed again in float64, without
Rankwise, and compared with the captured operator. Expected: every layer is captured within rounding of
float32, or left out with the true reason.
"""

import copy
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankwise as rw
from experiments.coverage.families import difference, shown
from experiments.render import markdown_table
from experiments.study import Report, Study
from rankwise.errors import CaptureError, InputError

MODELS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PACKAGES = ["x-transformers", "mlstm_kernels", *dict.fromkeys(model["package"] for model in MODELS["models"])]


def split(x: Tensor, heads: int) -> Tensor:
    """Return (B, T, H·K) as (B, H, T, K)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def softmax(q: Tensor, k: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1)


# --- matrices by hand ------------------------------------------------------------------------------------


def x_transformers(
    layer: Any, x: Tensor, rel_pos: Any = None, rotary_pos_emb: Any = None, **rest: Any
) -> Tensor:
    """Causal attention of x-transformers, with the options in `OPTIONS`."""
    attend, q, k = layer.attend, split(layer.to_q(x), layer.heads), split(layer.to_k(x), layer.kv_heads)
    if layer.qk_norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    if rotary_pos_emb is not None:
        turn = torch.polar(torch.ones(()).double(), rotary_pos_emb[0][..., ::2])
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn) for t in (q, k))
        q, k = q.flatten(-2), k.flatten(-2)
    if layer.num_mem_kv:
        k = torch.cat([layer.mem_k.expand(len(x), -1, -1, -1), k], 2)
    k = F.pad(k, (0, 0, int(attend.add_zero_kv), 0)).repeat(1, layer.heads // layer.kv_heads, 1, 1)
    scores = -(q.unsqueeze(3) - k.unsqueeze(2)).square().sum(-1) if attend.l2_distance else q @ k.mT
    scores = scores * attend.scale
    if attend.pre_softmax_talking_heads is not None:
        scores = scores + attend.pre_softmax_talking_heads(scores)
    rows, columns = scores.shape[-2:]
    if rel_pos is not None:
        ages = torch.arange(rows)[:, None] - torch.arange(columns)
        scores = scores - rel_pos.slopes * ages.abs()
    later = torch.ones(rows, columns).triu(columns - rows + 1).bool()
    scores = scores.masked_fill(later, -torch.inf)
    if attend.selective:  # a token hides others from the tokens after it, but not itself or the first
        hides = scores[:, 0].relu() * (1 - torch.eye(rows))
        hides[..., 0] = 0
        scores = scores - F.pad(hides, (0, 0, 1, -1)).cumsum(-2)[:, None]
    if "sparse_topk" in str(attend.attn_fn):
        scores = scores.masked_fill(scores < scores.topk(layer.sparse_topk).values[..., -1:], -torch.inf)
    if attend.inverted_attention:
        return F.normalize(scores.softmax(-2), p=1, dim=-1)
    if attend.attn_fn is F.sigmoid:
        return scores.sigmoid()
    mix = attend.post_softmax_talking_heads or nn.Identity()
    return mix(scores.softmax(-1))


def nystrom(layer: Any, x: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """softmax(Q̃ Kᵀ), and softmax(Q K̃ᵀ) · pseudo-inverse of softmax(Q̃ K̃ᵀ); zeros before the tokens."""
    x = F.pad(x, (0, 0, -x.shape[1] % layer.num_landmarks, 0))
    q, k, _ = (split(part, layer.heads) for part in layer.to_qkv(x).chunk(3, -1))
    few_q, few_k = (part.unflatten(2, (layer.num_landmarks, -1)).mean(3) for part in (q, k))
    inner, one = softmax(few_q, few_k), torch.eye(layer.num_landmarks)
    inverse = inner.mT / (inner.sum(-1).max() * inner.sum(-2).max())
    for _ in range(layer.pinv_iterations):
        step = inner @ inverse
        inverse = inverse @ (13 * one - step @ (15 * one - step @ (7 * one - step))) / 4
    return softmax(few_q, k), softmax(q, few_k) @ inverse


def linformer(layer: Any, x: Tensor) -> Tensor:
    keys = layer.proj_k.mT @ layer.to_k(x)
    return softmax(split(layer.to_q(x), layer.heads), split(keys, keys.shape[-1] // layer.dim_head))


def performer(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """φ(Q) φ(K)ᵀ with rows of sum 1."""
    q, k = (part * part.shape[-1] ** -0.25 for part in (q, k))
    features = [part @ layer.projection_matrix.mT for part in (q, k)]
    halves = [part.square().sum(-1, keepdim=True) / 2 for part in (q, k)]
    phi_q = (features[0] - halves[0] - features[0].amax(-1, keepdim=True)).exp() + 1e-4
    phi_k = (features[1] - halves[1] - features[1].amax((-1, -2), keepdim=True)).exp() + 1e-4
    return F.normalize(phi_q @ phi_k.mT, p=1, dim=-1)


def mamba(layer: Any, x: Tensor) -> Tensor:
    """M[t, s] = Σ_n C[t, n] exp(A[n] Σ_{s<r≤t} Δ[r]) Δ[s] B[s, n] for each channel."""
    u = layer.in_proj(x).chunk(2, -1)[0].mT
    u = F.silu(layer.conv1d(u)[..., : u.shape[-1]].mT)
    size = layer.A_log.shape[-1]
    step, b, c = layer.x_proj(u).split([layer.dt_proj.in_features, size, size], -1)
    step = F.softplus(layer.dt_proj(step)).mT  # (B, D, T)
    passed = step.cumsum(-1)
    passed = (passed[..., :, None] - passed[..., None, :]).clamp(min=0)
    decay = (-layer.A_log.exp()[:, None, None] * passed[..., None]).exp()  # (B, D, T, S, N)
    return torch.einsum("btn,bdtsn,bsn,bds->bdts", c, decay, b, step).tril()


def mlstm(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products of queries and keys with gates that decay, each row divided by its sum, or by at least 1."""
    gates, heads, rows = torch.cat([q, k, v], -1), layer.config.num_heads, q.shape[1]
    forget = F.logsigmoid(layer.fgate(gates)).mT.cumsum(-1)
    gates = forget[..., None] - forget[..., None, :] + layer.igate(gates).mT[..., None, :]
    gates = gates.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    top = gates.amax(-1, keepdim=True)
    q, k = split(q, heads), split(k, heads)
    products = q @ k.mT / q.shape[-1] ** 0.5 * (gates - top).exp()
    return products / (products.sum(-1, keepdim=True).abs().maximum((-top).exp()) + 1e-6)


def queries_and_keys(layer: Any, x: Tensor, encoder_hidden_states: Any = None, **rest: Any) -> Tensor:
    """Attention of diffusers, of the keys' sequence if there is one."""
    keys = layer.to_k(x if encoder_hidden_states is None else encoder_hidden_states)
    return softmax(split(layer.to_q(x), layer.heads), split(keys, layer.heads))


def joint_projection(layer: Any, x: Tensor, mask: Any = None, **rest: Any) -> Tensor:
    """Attention of timm: in windows with a bias by distance, and a mask for shifted windows."""
    q, k, _ = (split(part, layer.num_heads) for part in layer.qkv(x).chunk(3, -1))
    bias: Any = 0.0
    if hasattr(layer, "relative_position_bias_table"):
        bias = layer.relative_position_bias_table[layer.relative_position_index].permute(2, 0, 1)
    if mask is not None:
        bias = bias + mask.repeat(len(x) // len(mask), 1, 1)[:, None]
    return softmax(q, k, bias)


def torch_attention(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **rest: Any
) -> Tensor:
    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    q, k = (split(F.linear(x, weights[i], biases[i]), layer.num_heads) for i, x in enumerate((query, key)))
    return softmax(q, k, 0.0 if attn_mask is None else attn_mask)


ATTENTIONS = (x_transformers, nystrom, linformer, performer, queries_and_keys, joint_projection)
MATRICES: dict[str, Any] = {one.__name__: one for one in (*ATTENTIONS, torch_attention, mamba, mlstm)}
"""By name, functions of a layer in float64 and of its arguments that return its matrices (B, H, T, S)."""

# --- models ----------------------------------------------------------------------------------------------

INPUTS: dict[str, Callable[[], Tensor]] = {
    "words": lambda: torch.randint(1, 50, (2, 12)),
    "states": lambda: torch.randn(2, 12, 32),
    "context": lambda: torch.randn(2, 7, 32),
    "latents": lambda: torch.randn(2, 4, 8, 8),
    "image": lambda: torch.randn(2, 3, 32, 32),
    "labels": lambda: torch.tensor([1, 2]),
}


def cases() -> Iterator[dict[str, Any]]:
    """Yield the entries of `MODELS`, and those of the options of x-transformers."""
    for name, value in MODELS["options"].items():
        layers = {"make": "x_transformers.Decoder", "dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}
        layers |= {"rotary_pos_emb": name == "rotary_emb_dim", name: value}
        build = {"make": "x_transformers.TransformerWrapper", "num_tokens": 50, "max_seq_len": 12}
        about = {"package": "x-transformers", "name": f"{name}={value}", "inputs": ["words"]}
        yield about | {"build": build | {"attn_layers": layers}, "layers": {"Attention": "x_transformers"}}
    yield from MODELS["models"]


def made(settings: dict[str, Any]) -> Any:
    """Call what ``make`` names with the other settings, and first do so in their own tables."""
    given = {name: made(value) if isinstance(value, dict) else value for name, value in settings.items()}
    if "make" not in given:
        return given
    module, _, name = given.pop("make").rpartition(".")
    return getattr(import_module(module), name)(**given)


# --- comparison ------------------------------------------------------------------------------------------


@torch.no_grad()
def check(case: dict[str, Any]) -> Report:
    """Capture one model and compare its operators with the matrices by hand, in the order of the calls."""
    model, layers = made(case["build"]).eval(), case.get("layers", {})
    arguments = [INPUTS[one]() if one in INPUTS else one for one in case["inputs"]]
    mixers = [layer for layer in model.modules() if type(layer).__name__ in layers]
    by_hand: list[Tensor] = []

    def compute(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        matrix, named = MATRICES[layers[type(layer).__name__]], {name: exact(kwargs[name]) for name in kwargs}
        matrices = matrix(copy.deepcopy(layer).double(), *map(exact, args), **named)
        by_hand.extend(matrices if isinstance(matrices, tuple) else (matrices,))

    for layer in model.modules():  # usual initial weights give almost uniform attention
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1.5 / layer.in_features**0.5)
    hooks = [layer.register_forward_pre_hook(compute, with_kwargs=True) for layer in mixers]
    model(*arguments)
    for hook in hooks:
        hook.remove()
    entry = {"package": case["package"], "model": case["name"], "layers": len(by_hand)}
    try:
        with rw.capture(model) as trace:
            model(*arguments)
    except CaptureError as error:
        empty: Report = {"kinds": [], "shapes": [], "difference": None}
        return entry | empty | {"mixers": 0, "notes": [error.got]}
    operators = [site.operator.dense() for site in trace.mixers]
    return entry | {
        "mixers": len(operators),
        "kinds": sorted({site.kind for site in trace.mixers}),
        "shapes": list(dict.fromkeys("{} × {}".format(*one.shape[-2:]) for one in operators)),
        "difference": max(map(difference, operators, by_hand)),
        "notes": [f"{one.type}: {one.reason}" for one in trace.uncaptured] + trace.notes,
    }


def exact(value: Any) -> Any:
    """Return a tensor of floats, also in a tuple, in float64, and anything else as it is."""
    if isinstance(value, tuple):
        return tuple(map(exact, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def measure() -> Report:
    """Check every case; raise if a package is missing."""
    missing = [name for name in PACKAGES if not list(distributions(name=name))]
    if missing:
        raise InputError(
            "third_party",
            expected=f"the packages {', '.join(PACKAGES)}",
            got=f"no {', '.join(missing)}",
            fix=f"pip install {' '.join(missing)}.",
        )
    torch.manual_seed(0)
    versions = {name: version(name) for name in PACKAGES}
    return {"packages": versions, "entries": list(map(check, cases()))}


HEADINGS = ("package", "model", "layers captured", "operator", "T × S", "max \\|M − matrix by hand\\|")


def tables(report: Report) -> dict[str, str]:
    rows, notes = [], defaultdict(list)
    for entry in report["entries"]:
        captured = f"{entry['mixers']} of {entry['layers']}" if entry["layers"] else "refused"
        error = "–" if entry["difference"] is None else shown(entry["difference"])
        operators = [", ".join(entry[name]) or "–" for name in ("kinds", "shapes")]
        rows.append((entry["package"], entry["model"], captured, *operators, error))
        for note in dict.fromkeys(entry["notes"]):
            notes[note].append(f"{entry['package']}: {entry['model']}")
    packages = " ".join(f"{name}=={version}" for name, version in report["packages"].items())
    told = [(note.replace("|", "\\|"), "; ".join(models)) for note, models in notes.items()]
    return {
        "packages": packages,
        "table": markdown_table(HEADINGS, rows),
        "notes": markdown_table(("note or reason, word for word", "models"), told),
    }


STUDY = Study("third_party", lambda data: measure(), "evidence/third-party", tables)
