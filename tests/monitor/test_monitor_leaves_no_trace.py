"""Training with a monitor is bit-identical, also in autocast and with layers that act on modes."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.monitor.monitor import preserve_merged_weights

WIDTH = 8
PROBE = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
BFLOAT16 = ("cpu", torch.bfloat16)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


class WrittenOut(nn.Module):
    """Attention as products and a softmax, whose logits change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.query(x) @ self.key(x).mT
        logits += torch.full(logits.shape[-2:], -torch.inf).triu(1)
        return self.drop(logits.softmax(-1)) @ x


class BringsAutocast(nn.Module):
    """Enters an autocast made before the audit, like a model that accelerate prepares."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cast = encoder(), torch.autocast(*BFLOAT16)

    def forward(self, x: Tensor) -> Tensor:
        with self.cast:
            return self.inner(x)


class Keeping(BringsAutocast):
    """Enters a new autocast with its cache on."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(*BFLOAT16, cache_enabled=True):
            return self.inner(x)


class Decorated(BringsAutocast):
    """Its ``forward`` is decorated by autocast."""

    @torch.autocast(*BFLOAT16)
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Merging(nn.Linear):
    """Linear layer with a product B A that it adds to its weight for evaluation, as in loralib."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.merged = False
        self.a, self.b = (nn.Parameter(torch.randn(shape) / 10) for shape in ((2, WIDTH), (WIDTH, 2)))

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        assert self.merged != self.training
        added = 0 if self.merged else F.linear(x, self.b @ self.a)
        return F.linear(x, self.weight, self.bias) + added


class Passing(Merging):
    """Its ``train`` passes its arguments on without names."""

    def train(self, *args: Any, **kwargs: Any) -> "Passing":
        super().train(*args, **kwargs)
        return self


class Otherwise(Merging):
    """Its ``train`` has another name for the mode."""

    def train(self, is_train: bool = True) -> "Otherwise":
        super().train(is_train)
        return self


def followed_by(*layers: type[nn.Module]) -> nn.Module:
    return nn.Sequential(encoder(), *(layer() for layer in layers))


with_merging, with_passing = partial(followed_by, Merging, Merging), partial(followed_by, Passing, Otherwise)


def compiled() -> nn.Module:
    return torch.compile(encoder(), backend="eager")


def trained(
    make: Callable[[], nn.Module], watched: bool, cast: Callable[[], Any] = nullcontext, between: bool = False
) -> dict[str, Tensor]:
    """Return weights and random numbers after two steps of two passes, audited before or between passes."""
    torch.manual_seed(0)
    model = make().train()
    monitor = rw.RankMonitor(PROBE, every=1, stop_on="largest_logit > 1e9")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        loss = torch.zeros(())
        with cast():
            for audits in (not between, between):
                if watched and audits:
                    assert monitor.step(model, step) is not None
                    assert all(module.training for module in model.modules())
                loss = loss + model(torch.randn(2, 6, WIDTH)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is not None for weight in model.parameters())
        optimizer.step()
    return {**model.state_dict(), "random numbers": torch.rand(3)}


def outer() -> torch.autocast:
    return torch.autocast(*BFLOAT16)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize(
    ("make", "cast", "between"),
    [
        (encoder, nullcontext, False),
        (compiled, nullcontext, False),
        (WrittenOut, nullcontext, False),
        (WrittenOut, nullcontext, True),
        (encoder, outer, False),
        (BringsAutocast, outer, False),
        (Decorated, outer, False),
        (Decorated, nullcontext, True),
        (Keeping, outer, False),
        (with_merging, nullcontext, False),
        (with_merging, nullcontext, True),
        (with_merging, outer, False),
        (with_passing, nullcontext, True),
    ],
)
def test_training_is_bit_identical_with_a_monitor(make: Any, cast: Any, between: bool) -> None:
    watched, alone = (trained(make, each, cast, between) for each in (True, False))
    assert watched.keys() == alone.keys()
    assert all(torch.equal(watched[name], alone[name]) for name in alone)


def test_an_audit_between_passes_in_autocast_changes_only_rounding() -> None:
    """Each pass has its own casts, so gradients are added in float32 instead of bfloat16."""
    watched, alone = (trained(encoder, each, outer, between=True) for each in (True, False))
    for name, weight in alone.items():
        torch.testing.assert_close(watched[name], weight, rtol=2**-8, atol=2**-8)


def test_an_audit_in_autocast_does_not_remove_gradients() -> None:
    model = encoder().eval()
    with outer():
        rw.audit(model, [PROBE])
        model(PROBE).float().square().mean().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_an_audit_runs_in_the_dtype_of_autocast() -> None:
    model = encoder().eval()
    with outer():
        half = rw.RankMonitor(PROBE).step(model, 0)
        assert torch.is_autocast_cache_enabled()
    whole = rw.RankMonitor(PROBE).step(model, 0)
    assert half is not None
    assert whole is not None
    assert half.heads[0].row_entropy != whole.heads[0].row_entropy
    assert half.heads[0].row_entropy == pytest.approx(whole.heads[0].row_entropy, rel=2**-8)


class Caching(nn.Module):
    """In evaluation mode, fills a buffer that was None, adds a buffer and removes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()
        self.register_buffer("cache", None)
        self.register_buffer("hidden", None, persistent=False)
        self.register_buffer("dropped", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.cache is None:
            self.cache = self.hidden = x.mean(1)
            self.register_buffer("added", torch.ones(1), persistent=False)
            del self.dropped
        return self.inner(x)


def test_an_audit_restores_filled_added_and_removed_buffers() -> None:
    model = Caching().train()
    names, dropped = list(model.state_dict()), model.dropped
    assert rw.RankMonitor(PROBE).step(model, 0) is not None
    assert list(model.state_dict()) == names
    assert model.cache is None
    assert model.hidden is None
    assert model.dropped is dropped
    assert not hasattr(model, "added")
    model.hidden = torch.ones(1)
    assert "hidden" not in model.state_dict()  # still not persistent


@pytest.mark.parametrize("watched", [True, False])
def test_an_audit_ignores_casts_of_earlier_passes(watched: bool) -> None:
    """A block of autocast keeps the first cast of a weight even if the weight changes."""

    def audited(ran: bool) -> list[str]:
        torch.manual_seed(0)
        model = encoder().train(watched)
        with outer():
            if ran:
                model(PROBE)
            for weight in model.parameters():
                weight.data *= 2
            found = rw.RankMonitor(PROBE).step(model, 0) if watched else rw.audit(model, [PROBE])
        return [record.model_dump_json() for record in (*found.heads, *found.states)]

    assert audited(ran=True) == audited(ran=False) != []


def test_only_weights_that_a_layer_may_merge_are_restored() -> None:
    asleep, awake = Merging().eval(), Merging()
    before = [layer.weight.detach().clone() for layer in (asleep, awake)]
    layers, on_meta = nn.ModuleList([asleep, awake]), Merging().to("meta")
    with preserve_merged_weights(layers), preserve_merged_weights(on_meta):
        for layer in (asleep, awake):
            layer.weight.data += 1
    assert torch.equal(asleep.weight, before[0] + 1)
    assert torch.equal(awake.weight, before[1])


class Fits(nn.Module):
    """Its ``train`` fits it to data instead of changing the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fitted = encoder(), 0

    def train(self, data: Any = None, epochs: int = 3) -> "Fits":
        self.fitted += 1
        return self

    def eval(self) -> "Fits":
        self.training = False
        self.inner.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_train_method_without_a_mode_is_not_called() -> None:
    model = Fits()
    rw.RankMonitor(PROBE).step(model, 0)
    assert model.fitted == 0
    assert model.training
    assert model.inner.training
