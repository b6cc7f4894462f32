"""Tests of which modules are blocks, how layers are numbered, and which tensors are token states."""

import pytest
import torch
from capture_zoo import (
    BATCH,
    CAUSAL,
    HEADS,
    TOKENS,
    WIDTH,
    Attention,
    Block,
    CrossStack,
    Head,
    InPlace,
    ManyHeads,
    Residual,
    ResidualOutside,
    Shared,
    Stack,
    Stages,
    SublayerBlock,
    TokensFirst,
    Twins,
    Unbatched,
    attention_block,
    fused,
    hidden,
    kind,
    linear,
    plain,
    seen,
    stack_of,
)
from torch import nn

import rankwise as rw
from rankwise.errors import InputError
from rankwise.tracing import Intervention
from rankwise.tracing.block_finder import block_items, matches
from rankwise.tracing.block_finder import stack_of as stack_name


def layers_of(records):
    return [record.layer for record in records]


def calls_of(model, names, *inputs):
    """Return the first inputs and the outputs of modules, in lists by name."""
    with torch.no_grad(), rw.tracing.record_calls(model, names, copy=True) as calls:
        model(*(one.clone() for one in inputs))
    read = {name: [call.args[0] for call in calls if call.name == name] for name in names}
    return read, {name: [call.output for call in calls if call.name == name] for name in names}


def sequential(*parts):
    return nn.Sequential(*parts, nn.LayerNorm(WIDTH))


# The model, the names of its blocks, their number.
LINKED = {
    "plain": (stack_of, "blocks.{}", 3),
    "fused": (lambda: stack_of(fused), "blocks.{}", 3),
    "one block": (lambda: stack_of(depth=1), "blocks.{}", 1),
    "several heads": (lambda: Stack(lambda: Block(ManyHeads(3, 8))), "blocks.{}", 3),
    "one head": (lambda: Stack(lambda: Block(ManyHeads(1, WIDTH))), "blocks.{}", 3),
    "one head, one block": (lambda: Stack(lambda: Block(ManyHeads(1, WIDTH)), 1), "blocks.{}", 1),
    "heads as wide as the model": (lambda: Stack(lambda: Block(ManyHeads(3, WIDTH))), "blocks.{}", 3),
    "nn.Sequential of blocks": (lambda: sequential(*(attention_block() for _ in range(3))), "{}", 3),
    "blocks in place": (lambda: Stack(InPlace), "blocks.{}", 3),
    "blocks of residual halves": (
        lambda: Stack(lambda: nn.Sequential(Residual(Attention()), Residual(linear()))),
        "blocks.{}",
        3,
    ),
    "blocks of a list of sublayers": (lambda: Stack(lambda: SublayerBlock(1)), "blocks.{}", 3),
    "mixed blocks": (lambda: sequential(attention_block(), Residual(Attention())), "{}", 2),
    **{
        f"stages of {depths} blocks": (lambda depths=depths: Stages(depths), depths, sum(depths))
        for depths in [(2, 2), (1, 1), (1, 2), (3,), (1,)]
    },
}


@pytest.mark.parametrize("case", LINKED)
def test_states_are_inputs_of_blocks_and_the_last_output(case):
    make, names, depth = LINKED[case]
    model, x = make().eval(), hidden()
    if isinstance(names, str):
        names = [names.format(at) for at in range(depth)]
    else:
        names = [f"stages.{stage}.{at}" for stage, blocks in enumerate(names) for at in range(blocks)]
    read, gave = calls_of(model, names, x)
    trace = seen(model, x)
    assert trace.notes == []
    assert layers_of(trace.states) == list(range(depth + 1))
    assert [state.name for state in trace.states] == [names[0], *names]
    for name, state in zip(names, trace.states, strict=False):
        assert torch.equal(state.tokens, read[name][0])
    assert torch.equal(trace.states[-1].tokens, gave[names[-1]][0])
    assert sorted(set(layers_of(trace.mixers))) == list(range(depth))
    assert all(site.name.startswith(names[site.layer]) for site in trace.mixers)
    assert len({state.stack for state in trace.states} | {site.stack for site in trace.mixers}) == 1


@pytest.mark.parametrize("heads", [1, 3])
def test_heads_that_are_modules_are_sites_of_one_head_in_the_layer_of_their_block(heads):
    trace = seen(Stack(lambda: Block(ManyHeads(heads, WIDTH // heads))).eval(), hidden())
    assert [(site.name, site.layer) for site in trace.mixers] == [
        (f"blocks.{layer}.attention.heads.{head}", layer) for layer in range(3) for head in range(heads)
    ]
    for site in trace.mixers:
        assert torch.equal(site.operator.support(), CAUSAL.expand(BATCH, 1, TOKENS, TOKENS))


def test_a_single_head_called_as_the_model_is_not_a_block():
    trace = seen(Head(WIDTH).eval(), hidden())
    assert [(site.name, site.layer) for site in trace.mixers] == [("", 0)]
    assert trace.states == []


# --- the stream is not the output of blocks -----------------------------------------------------------------


def test_states_are_inputs_of_sublayers_if_the_residual_is_added_outside():
    model, x = ResidualOutside().eval(), hidden()
    names = [f"layers.{at}.0" for at in range(3)]
    read, gave = calls_of(model, names, x)
    trace = seen(model, x)
    assert layers_of(trace.states) == layers_of(trace.mixers) == [0, 1, 2]
    for name, state in zip(names, trace.states, strict=True):
        assert torch.equal(state.tokens, read[name][0])
        assert not any(torch.equal(state.tokens, gave[other][0]) for other in names)
    (note,) = trace.notes
    assert "the residual is added outside" in note
    assert "the last state is missing" in note


def test_the_output_of_a_single_sublayer_is_not_a_state():
    trace = seen(ResidualOutside(1).eval(), hidden())
    assert layers_of(trace.states) == [0]
    (note,) = trace.notes
    assert "nothing read the output of its only block" in note


class FeedForward(Residual):
    """A block of another class than the blocks with a mixer."""


@pytest.mark.parametrize("kinds", ["amam", "ammm", "aamm"])
def test_blocks_of_a_hybrid_without_a_mixer_are_layers(kinds):
    parts = {"a": lambda: Residual(Attention()), "m": lambda: FeedForward(linear())}
    model, x = sequential(*(parts[one]() for one in kinds)).eval(), hidden()
    names = [str(at) for at in range(4)]
    read, gave = calls_of(model, names, x)
    trace = seen(model, x)
    assert layers_of(trace.mixers) == [at for at, one in enumerate(kinds) if one == "a"]
    assert all(site.name == f"{names[site.layer]}.inner" for site in trace.mixers)
    assert layers_of(trace.states) == [0, 1, 2, 3, 4]
    for state, tokens in zip(trace.states, (*(read[at] for at in names), gave[names[3]]), strict=True):
        assert torch.equal(state.tokens, tokens[0])
    assert trace.notes == []


# --- hybrids: layers and states depend on what runs, not on names of classes --------------------------------


def mixing(name):
    """Return a class of residual attention with a given name."""

    def forward(self, x):
        y = self.norm(x)
        return x + self.o(torch.softmax(self.q(y) @ self.k(y).mT / 4, dim=-1) @ self.v(y))

    return kind(forward, name, norm=lambda: nn.LayerNorm(WIDTH), q=linear, k=linear, v=linear, o=linear)


class Holder(nn.Module):
    """A block that holds any part."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        return self.mix(x)


class Pair(Holder):
    def forward(self, x):
        return x.mean(2), self.mix(x)


class Record(Holder):
    def forward(self, x):
        return {"scores": None, "states": self.mix(x)}


def hybrid(order, name, hold=lambda part: part, read=lambda output: output):
    """Return a model of a list of blocks: `a` is attention, `f` a feed-forward block."""
    parts = {"a": mixing(name), "f": lambda: FeedForward(linear())}

    def forward(self, x):
        for layer in self.layers:
            x = read(layer(x))
        return self.norm(x)

    layers = [hold(parts[one]()) for one in order]
    return kind(forward, layers=lambda: nn.ModuleList(layers), norm=lambda: nn.LayerNorm(WIDTH))().eval()


HOLDERS = {
    "items": (lambda part: part, lambda output: output),
    "held": (Holder, lambda output: output),
    "in pairs": (Pair, lambda output: output[1]),
    "in records": (Record, lambda output: output["states"]),
}


HYBRIDS = [(order, "items") for order in ("affa", "aff", "afaf")]
HYBRIDS += [("affa", held) for held in HOLDERS if held != "items"]


@pytest.mark.parametrize(("order", "held"), HYBRIDS)
@pytest.mark.parametrize("name", ["Att", "SelfAttention"])
def test_layers_and_states_of_a_hybrid_do_not_depend_on_names(order, held, name):
    model, x = hybrid(order, name, *HOLDERS[held]), hidden()
    read, _ = calls_of(model, [*(f"layers.{at}" for at in range(len(order))), "norm"], x)
    trace = seen(model, x)
    assert layers_of(trace.mixers) == [at for at, one in enumerate(order) if one == "a"]
    assert layers_of(trace.states) == list(range(len(order) + 1))
    for state, given in zip(trace.states, read.values(), strict=True):
        assert torch.equal(state.tokens, given[0])
    assert trace.notes == []


def test_states_of_blocks_without_a_mixer_have_the_axes_of_the_others():
    x = hidden(TOKENS, BATCH)
    trace = seen(sequential(TokensFirst(), FeedForward(linear()), TokensFirst()).eval(), x)
    assert layers_of(trace.mixers) == [0, 2]
    assert layers_of(trace.states) == [0, 1, 2, 3]
    tokens = x.transpose(0, 1)
    assert torch.equal(trace.states[0].tokens, tokens)
    assert {state.tokens.shape for state in trace.states} == {tokens.shape}


def test_a_block_without_a_mixer_has_the_mask_of_the_blocks_with_one():
    def forward(self, x, attention_mask):
        for layer in self.layers:
            x = layer(x, attention_mask if hasattr(layer, "q") else None)
        return x

    def attend(self, x, attention_mask):
        scores = self.q(x) @ x.mT + torch.where(attention_mask == 0, -torch.inf, 0.0)[:, None]
        return x + scores.softmax(-1) @ x

    attention = kind(attend, q=linear)
    plain_block = kind(lambda self, x, attention_mask=None: x + self.inner(x), inner=linear)
    layers = nn.ModuleList([attention(), plain_block()])
    mask = torch.ones(BATCH, TOKENS)
    mask[0, 4:] = 0
    trace = seen(kind(forward, layers=lambda: layers)().eval(), hidden(), attention_mask=mask)
    assert layers_of(trace.states) == [0, 1, 2]
    assert all(torch.equal(state.mask, mask.bool()) for state in trace.states)


def test_blocks_before_the_first_mixer_are_not_in_a_stack():
    def forward(self, x):
        for layer in (*self.before, *self.layers):
            x = layer(x)
        return x

    before = nn.ModuleList([FeedForward(linear()), FeedForward(linear())])
    model = kind(forward, before=lambda: before, layers=lambda: hybrid("af", "Att").layers)().eval()
    trace = seen(model, hidden())
    assert {state.stack for state in trace.states} == {"layers"}
    assert layers_of(trace.states) == [0, 1, 2]


def test_changes_in_place_do_not_reach_states():
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        y = self.norm(x)
        x.zero_()
        return y

    model, x = type("Scaled", (Stack,), {"forward": forward})(InPlace, 2).eval(), hidden()
    _, gave = calls_of(model, ["blocks.1"], x)
    trace = seen(model, x)
    assert torch.equal(trace.states[0].tokens, x)
    assert torch.equal(trace.states[-1].tokens, gave["blocks.1"][0])


def test_changes_in_place_do_not_reach_values_and_outputs():
    def forward(self, x):
        q, values = self.proj(x)[:, None], x[:, None].clone()
        y = fused(q, q, values)
        y += 1
        values.zero_()
        return y[:, 0]

    added = kind(forward, proj=linear)
    for site in seen(Stack(lambda: Residual(added())).eval(), hidden()).mixers:
        assert (site.operator @ site.values - site.output).abs().max() < 1e-5


# --- other axes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "batch"), [(6, 2), (2, 6), (9, 3)])
def test_tokens_may_be_on_the_first_axis(tokens, batch):
    x = hidden(tokens, batch)  # (T, B, D)
    trace = seen(Stack(TokensFirst).eval(), x)
    assert {tuple(site.operator.shape) for site in trace.mixers} == {(batch, HEADS, tokens, tokens)}
    assert {site.sequences for site in trace.mixers} == {batch}
    assert torch.equal(trace.states[0].tokens, x.transpose(0, 1))
    assert {tuple(state.tokens.shape) for state in trace.states} == {(batch, tokens, WIDTH)}


@pytest.mark.parametrize("mix", [plain, fused])
def test_a_model_may_have_no_batch_axis(mix):
    x = torch.randn(TOKENS, WIDTH)
    trace = seen(Stack(lambda: Unbatched(mix)).eval(), x)
    assert {tuple(site.operator.shape) for site in trace.mixers} == {(1, HEADS, TOKENS, TOKENS)}
    assert layers_of(trace.states) == [0, 1, 2, 3]
    assert torch.equal(trace.states[0].tokens, x[None])


def test_states_may_be_in_a_tuple_inside_the_tuple_that_a_block_returns():
    """As blocks with experts and a cache do: ((states, scores of experts), cache)."""
    block = kind(lambda self, x: ((self.inner(x), x.mean(2)), (None, x[:, :1])), inner=attention_block)

    def forward(self, x):
        for one in self.blocks:
            (x, _), _ = one(x)
        return x

    class Out(Intervention):
        blocks = frozenset({"blocks.0"})

        def on_block(self, block):
            return block.input

    model, x = kind(forward, blocks=lambda: nn.ModuleList([block(), block()]))().eval(), hidden()
    trace = seen(model, x)
    assert [state.name for state in trace.states] == ["blocks.0", "blocks.0", "blocks.1"]
    with torch.no_grad(), rw.capture(model, intervention=Out()):
        without = model(x)
    assert torch.equal(without, model.blocks[1](x)[0][0])


# --- lists in lists, towers, one block called twice ---------------------------------------------------------


def test_stages_that_break_the_stream_are_separate_stacks():
    def forward(self, x):  # (B, D, H, W) → tokens → (B, D, H, W)
        return self.blocks(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])

    def run(self, x):
        for stage in self.stages:
            x = stage(x)
        return x

    picture = kind(forward, blocks=lambda: stack_of(depth=2))
    maps = kind(run, stages=lambda: nn.ModuleList([picture(), picture()]))
    trace = seen(maps().eval(), torch.randn(2, WIDTH, 3, 2))
    assert [(site.stack, site.layer) for site in trace.mixers] == [
        (f"stages.{stage}.blocks.blocks", at) for stage in range(2) for at in range(2)
    ]
    assert layers_of(trace.states) == [0, 1, 2] * 2


def test_one_encoder_on_two_inputs_runs_in_two_forward_passes():
    a, b = hidden(), hidden(tokens=5)
    trace = seen(Twins().eval(), a, b)
    for records, count in ((trace.mixers, 3), (trace.states, 4)):
        places = [(record.forward_pass, record.layer) for record in records]
        assert places == [(run, at) for run in (0, 1) for at in range(count)]
    assert torch.equal(trace.states[0].tokens, a)
    assert torch.equal(trace.states[4].tokens, b)
    assert {site.stack for site in trace.mixers} == {"encoder.blocks"}


@pytest.mark.parametrize("times", [1, 4])
def test_each_call_of_a_shared_block_is_a_layer(times):
    model, x = Shared(times).eval(), hidden()
    read, gave = calls_of(model, ["blocks.0"], x)
    trace = seen(model, x)
    assert layers_of(trace.mixers) == list(range(times))
    assert {site.forward_pass for site in trace.mixers} == {0}
    for at, state in enumerate(trace.states[:-1]):
        assert torch.equal(state.tokens, read["blocks.0"][at])
    assert torch.equal(trace.states[-1].tokens, gave["blocks.0"][-1])


def test_two_mixers_of_one_block_share_its_layer():
    trace = seen(CrossStack().eval(), hidden(), hidden(tokens=5))
    assert [(site.layer, site.cross) for site in trace.mixers] == [
        (at, cross) for at in (0, 1) for cross in (False, True)
    ]
    assert layers_of(trace.states) == [0, 1, 2]


def test_blocks_that_change_the_number_of_tokens_have_layers_but_no_states():
    halving = kind(lambda self, x: self.attention(x)[:, ::2], attention=Attention)
    trace = seen(Stack(halving).eval(), hidden(tokens=16))
    assert [(site.layer, site.operator.shape[-1]) for site in trace.mixers] == [(0, 16), (1, 8), (2, 4)]
    assert trace.states == []
    trace = seen(sequential(attention_block(), halving()).eval(), hidden(tokens=16))
    assert layers_of(trace.states) == layers_of(trace.mixers) == [0, 1]


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("window", [2, 3])
def test_states_of_blocks_on_feature_maps_are_found(channels_first, window):
    height, width = 4, 6

    def forward(self, x):  # windows over a map, padded if they do not fit
        grid = x.permute(0, 2, 3, 1) if channels_first else x
        grid = nn.functional.pad(grid, (0, 0, 0, 0, 0, -height % window))
        parts = grid.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3)
        parts = self.attention(parts.flatten(0, 2).flatten(1, 2))
        grid = parts.unflatten(1, (window, window)).unflatten(0, (len(x), -1, width // window))
        mixed = grid.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :height]
        return x + (mixed.permute(0, 3, 1, 2) if channels_first else mixed)

    blocks = nn.Sequential(*[kind(forward, attention=Attention)() for _ in range(2)]).eval()
    x = torch.randn(BATCH, height, width, WIDTH)
    trace = seen(blocks, x.permute(0, 3, 1, 2).contiguous() if channels_first else x)
    assert [(site.layer, site.sequences) for site in trace.mixers] == [(0, BATCH), (1, BATCH)]
    assert layers_of(trace.states) == [0, 1, 2]
    assert torch.equal(trace.states[0].tokens, x.flatten(1, 2))


def test_an_uncaptured_block_counts_as_a_layer():
    def forward(self, x):  # an attention that is not seen: no function that is known mixes the tokens
        return (self.q_proj(x) * self.k_proj(x)).flip(1)

    unseen = kind(forward, "UncapturedModule", q_proj=linear, k_proj=linear)
    model = sequential(attention_block(), Block(unseen()), attention_block()).eval()
    trace = seen(model, hidden())
    assert [(site.name, site.layer) for site in trace.mixers] == [("0.attention", 0), ("2.attention", 2)]
    assert layers_of(trace.states) == [0, 1, 2, 3]
    (uncaptured,) = trace.uncaptured
    assert (uncaptured.name, uncaptured.type) == ("1.attention", "UncapturedModule")
    assert "no attention was seen inside it" in uncaptured.reason


def test_pytorchs_layer_may_be_the_whole_model():
    trace = seen(nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True).eval(), hidden())
    assert [site.name for site in trace.mixers] == [""]
    assert trace.uncaptured == []


# --- blocks named by the caller, and names ------------------------------------------------------------------


def test_the_caller_may_name_blocks():
    model = kind(
        lambda self, x: self.end(self.middle(self.start(x))),
        start=attention_block,
        middle=attention_block,
        end=attention_block,
    )().eval()
    assert seen(model, hidden()).states == []
    trace = seen(model, hidden(), capture={"blocks": "[sme]*"})
    assert {state.stack for state in trace.states} == {"start", "middle", "end"}
    assert [state.layer for state in trace.states if state.stack == "middle"] == [0, 1]


def test_a_pattern_names_blocks_and_no_module_inside_them():
    model = stack_of()
    trace = seen(model, hidden(), capture={"blocks": "blocks.*"})
    assert [state.name for state in trace.states] == ["blocks.0", "blocks.0", "blocks.1", "blocks.2"]
    some = seen(model, hidden(), capture={"blocks": "blocks.[01]"})
    assert [state.name for state in some.states] == ["blocks.0", "blocks.0", "blocks.1"]
    assert len(some.mixers) == 3
    with pytest.raises(InputError, match=r"blocks 'layers\.\*'.*no match"):
        rw.capture(model, blocks="layers.*")


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("decoder.layers.3", "decoder.layers.*", True),
        ("decoder.layers.3.attention", "decoder.layers.*", False),
        ("decoder.layers.3.attention", "*.layers.?.attention", True),
        ("layers.12", "layers.?", False),
        ("block1", "block[12]", True),
    ],
)
def test_patterns_match_part_by_part(name, pattern, fits):
    assert matches(name, pattern) is fits


@pytest.mark.parametrize(
    ("arguments", "stack"),
    [
        (["encoder.layer.3"], "encoder.layer"),
        (["stages.1.blocks.0"], "stages.*.blocks"),
        (["block2"], "block*"),
        (["encoder1.layers.0"], "encoder1.layers"),
        (["0"], "*"),
        (["layers.0.1"], "layers.*"),
        # numbers in the name of the module that runs the blocks are kept
        (["stages.1.blocks.0", "stages.1"], "stages.1.blocks"),
        (["stages.1.blocks.0", "stages"], "stages.*.blocks"),
    ],
)
def test_a_stack_is_named_after_its_blocks(arguments, stack):
    assert stack_name(*arguments) == stack


def test_items_of_lists_may_be_blocks_and_items_of_one_class_take_precedence():
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList([nn.Identity(), nn.Identity()]),
            "mixed": nn.ModuleList([nn.Identity(), nn.ReLU()]),
            "block1": nn.Tanh(),
            "block2": nn.Tanh(),
            "conv1": nn.Sigmoid(),
        }
    )
    names = {"layers.0": True, "layers.1": True, "mixed.0": False, "mixed.1": False}
    names |= {"block1": False, "block2": False}
    assert block_items(model, None) == names
