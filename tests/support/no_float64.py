"""A stand-in for a device without float64, such as MPS: its tensors are on the CPU and say they are not.

The device is registered for the whole process, so tests run this module in a process of its own.
"""

from typing import Any

import torch
import transformers
from tests.support.nets import collapsing
from tests.support.torch_names import tree_leaves, tree_map
from torch import Tensor, nn
from torch.utils import backend_registration

import rankwise as rw
from rankwise.importance import ImportanceSettings
from rankwise.models import ToSTConfig, ToSTForCausalLM

LIBRARY = torch.library.Library("_", "IMPL")
MOVES = ("_to_copy", "copy_", "index.Tensor", "index_put")
"""Operations that accept tensors of two devices: copies, and indices of tensors."""


def as_tensors(index: Any) -> Any:
    """Return an index with tensors in place of its lists, which torch would create on the device."""
    if isinstance(index, tuple):
        return tuple(as_tensors(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


class There(Tensor):
    """A tensor on the device; ``here`` has its numbers."""

    here: Tensor

    def tolist(self) -> Any:
        return self.here.tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(as_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(as_tensors(index), value)

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        options: dict[str, Any] = {"strides": here.stride(), "dtype": here.dtype, "device": "other:0"}
        there = Tensor._make_wrapper_subclass(cls, here.shape, **options)
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; raise as MPS does if its result is float64 or devices are mixed."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = any(isinstance(tensor, There) for tensor in given)
    mixed = there and any(not isinstance(tensor, There) and tensor.dim() for tensor in given)
    if mixed and not any(name in str(function) for name in MOVES):
        raise RuntimeError(f"{function}: expected all tensors to be on the same device")
    args, kwargs = tree_map(lambda leaf: leaf.here if isinstance(leaf, There) else leaf, (args, kwargs))
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == "other"
        kwargs["device"] = "cpu"

    def move(result: Any) -> Any:
        if not (there and isinstance(result, Tensor)):
            return result
        if result.dtype == torch.float64:
            raise TypeError("Cannot convert a tensor to float64: the device does not have it")
        return There(result)

    return tree_map(move, function(*args, **kwargs))


class Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]

    def get_rng_state(self, device: int) -> torch.Tensor:
        return torch.zeros(1)

    def set_rng_state(self, state: torch.Tensor, device: int) -> None: ...


def cases() -> dict[str, tuple[nn.Module, Any, dict[str, Any]]]:
    """Return models with a batch and importance settings."""
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 24, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0
    sizes = {"vocab_size": 24, "n_embd": 16, "n_layer": 1, "n_head": 2, "use_cache": False}
    words = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings=False))
    tost = ToSTForCausalLM(ToSTConfig(**words, tie_word_embeddings=False, half_life=[2.0, float("inf")]))
    states = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)
    batch = {"input_ids": ids, "attention_mask": mask}
    exact = {"exact": True, "estimates": False}  # There has no backward pass of an embedding
    return {
        "states": (*states, {"exact": True}),
        "next tokens": (gpt2, batch, {**exact, "tolerance": 0.1}),
        "divergence": (gpt2, batch, {**exact, "loss": "output"}),
        "function": (gpt2, batch, {**exact, "loss": lambda output, batch: output.logits.mean((1, 2))}),
        "half-lives": (tost, batch, exact),
    }


def register() -> None:
    """Register the device, and functions that create its tensors and generators on the CPU."""
    backend_registration._setup_privateuseone_for_python_backend("other", Backend())
    LIBRARY.fallback(lambda function, *args, **kwargs: run(function, args, kwargs), "PrivateUse1")
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    tensor, generator = torch.tensor, torch.Generator
    torch.tensor = lambda *args, device=None, **kwargs: tensor(*args, **kwargs).to(device)  # type: ignore[assignment]
    torch.Generator = lambda device=None: generator()  # type: ignore[assignment,misc]


def check_audits() -> None:
    """Raise if audits, with importance and at initialization, differ by more than rounding from the CPU."""
    for name, (model, batch, settings) in cases().items():
        options: dict[str, Any] = {"importance": ImportanceSettings(**settings), "attention_maps": "all"}
        options["at_init"] = name == "states"  # others would swap the data of tensors, which There cannot
        for method in ("exact", "estimate") if name == "states" else ("exact",):
            wanted, found = (
                rw.audit(model.eval().to(device), [batch], rank_method=method, **options)
                for device in ("cpu", "other")
            )
            assert {parameter.device.type for parameter in model.parameters()} == {"other"}, name
            assert len(found.heads) == len(wanted.heads) > 0, name
            for one, other in zip(found.heads, wanted.heads, strict=True):
                for of, ours, theirs in (
                    ("rank", one.numerical_rank, other.numerical_rank),
                    ("entropy", one.row_entropy, other.row_entropy),
                    ("cost", one.importance.exact, other.importance.exact),
                    ("estimate", one.importance.estimate, other.importance.estimate),
                ):
                    torch.testing.assert_close(
                        ours, theirs, rtol=1e-3, atol=1e-5, equal_nan=True, msg=f"{name}: {of}"
                    )
        print(name)


def check_compressions() -> None:
    """Raise if compressions differ from those on the CPU by more than rounding."""
    sizes: dict[str, Any] = {"vocab_size": 24, "tie_word_embeddings": False}
    gpt2 = transformers.GPT2Config(**sizes, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
    llama = transformers.LlamaConfig(
        **sizes, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(0, 24, (4, 12), generator=torch.Generator().manual_seed(0))}
    asked: list[tuple[Any, dict[str, Any]]] = [
        (gpt2, {"keep": {"heads": 0.5, "width": 0.5, "kv": 0.4}, "calibrate": 2}),
        (llama, {"keep": {"width": 0.5, "kv": 0.4}}),
    ]
    for config, options in asked:
        found = []
        for device in ("cpu", "other"):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config).eval().to(device)
            record = rw.compress(model, [batch], **options)
            found.append(record.model_dump() | record.worst.model_dump())
        ours, theirs = found
        assert ours["output_kl"] > 1e-6
        close: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5, "equal_nan": True}
        for name in ("attention_kl", "output_kl", "output_error", "loss_before", "loss_added"):
            torch.testing.assert_close(ours[name], theirs[name], msg=name, **close)
        for rows, name in (("heads", "width"), ("latents", "rank")):
            assert [row[name] for row in ours[rows]] == [row[name] for row in theirs[rows]]
        print(*options["keep"])


def check_skips() -> None:
    """Raise if certificates, trials and recommendations of λ differ from those on the CPU."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    averaging, batches = collapsing()
    for name, model, batch in (
        ("post-norm", encoder, torch.randn(2, 5, 8)),
        ("averages", averaging, next(batches)),
    ):
        found = []
        for device in ("cpu", "other"):
            model.eval().to(device)
            there, numbers = batch.to(device), []
            for skipped in (False, True):
                if skipped:
                    rw.add_lambda_skip(model, init=0.5, example=there)
                certificate = rw.certify_skip(model, there)
                numbers += [layer.model_dump() for layer in certificate.layers]
                (stack,) = rw.skips.direction_spread_by_layer(model, [there])
                numbers.append(rw.skips.choose_lambda(model, there, stack).model_dump())
                audit = rw.skips.recommend(rw.audit(model, [there]), model, there)
                numbers += [finding.evidence for finding in audit.findings if finding.code == "COLLAPSE"]
            rw.remove_lambda_skip(model)
            found.append(numbers)
        compare(*found, name)
        print(name)


def compare(first: Any, other: Any, name: str) -> None:
    """Raise if nested numbers differ by more than the rounding of float32."""
    if isinstance(first, float):
        torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-5, equal_nan=True, msg=name)
    elif isinstance(first, dict):
        compare(list(first.items()), list(other.items()), name)
    elif isinstance(first, list | tuple):
        assert len(first) == len(other), name
        for one, two in zip(first, other, strict=True):
            compare(one, two, f"{name}: {one}")
    else:
        assert first == other, name


if __name__ == "__main__":
    register()
    check_audits()
    check_skips()
    check_compressions()
