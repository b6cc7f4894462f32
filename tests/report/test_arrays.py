"""Tensors and figures of audits: numbers at their places, labels with units, and errors."""

import math
import re
import sys
from typing import Any

import numpy as np
import pytest
from tests.support import records
from tests.support.records import HEAD_MEASURES, STATE_MEASURES

import rankwise as rw
from rankwise.errors import InputError


@pytest.fixture(autouse=True)
def pyplot() -> Any:
    """Draw without a display, and close the figures."""
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def of(name: str) -> rw.Audit:
    return rw.Audit.model_validate(records.ALL[name]().model_dump())


@pytest.mark.parametrize("row", HEAD_MEASURES, ids=lambda row: row.name)
def test_maps_and_tensors_hold_every_head_at_its_place(row: Any) -> None:
    audit = of("encoder")
    if not any(math.isfinite(row.value(head)) for head in audit.heads):
        for read in (audit.plot, audit.to_tensor):
            with pytest.raises(InputError, match=f"{row.name} of heads: expected numbers in the audit"):
                read(row.name)
        return
    audit.heads.pop(0)
    ax, tensor = audit.plot(row.name), audit.to_tensor(row.name)
    cells = np.ma.filled(ax.images[0].get_array(), math.nan)
    for drawn, value in ((cells, row.value), (tensor.numpy(), lambda head: getattr(head, row.name))):
        expected = np.full(cells.shape, math.nan)
        for head in audit.heads:
            expected[head.layer, head.head] = value(head)
        np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    assert str(tensor.dtype) == "torch.float32"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer")


@pytest.mark.parametrize("row", STATE_MEASURES, ids=lambda row: row.name)
def test_depth_has_a_line_for_each_stack(row: Any) -> None:
    audit = of("encoder_decoder")
    if not any(math.isfinite(getattr(state, row.name)) for state in audit.states):
        return
    ax = audit.plot_depth(row.name)
    stacks = list(dict.fromkeys(state.stack for state in audit.states))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == stacks
    for stack, line in zip(stacks, ax.lines, strict=True):
        states = [state for state in audit.states if state.stack == stack]
        values = {state.blocks: getattr(state, row.name) for state in states}
        drawn = dict(zip(*line.get_data(), strict=True))
        assert drawn == {blocks: value for blocks, value in values.items() if math.isfinite(value)}
    assert ax.get_xlabel() == "blocks passed"


def test_labels_have_units_and_the_scale_marks_values_beyond_it() -> None:
    audit = of("encoder")
    assert audit.plot("row_entropy").figure.axes[1].get_ylabel() == "Row entropy (nats)"
    audit.heads[0] = audit.heads[0].model_copy(update={"sigma_max": 1e6})
    bar = audit.plot("sigma_max").images[0].colorbar
    assert bar.extend == "max"
    assert bar.vmax < 1e6
    assert audit.plot("effective_rank").images[0].colorbar.extend == "neither"
    cost = of("importance") if "importance" in records.ALL else None
    if cost is not None:
        unit = cost.importance.unit
        assert cost.plot("removal_cost").figure.axes[1].get_ylabel() == f"Cost of removal ({unit})"


@pytest.mark.parametrize("name", ["encoder_decoder", "nasty", "memberships", "mixed"])
def test_stacks_are_drawn_below_each_other_in_given_axes(name: str, pyplot: Any) -> None:
    audit, (left, right) = of(name), pyplot.subplots(1, 2)[1]
    assert audit.plot("effective_rank", ax=right) is right
    assert not left.images
    finite = sum(math.isfinite(head.effective_rank) for head in audit.heads)
    assert right.images[0].get_array().count() == finite
    assert len(pyplot.get_fignums()) == 1
    right.figure.canvas.draw()  # names of modules are not formulas


def test_figures_that_cannot_be_drawn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    audit = of("encoder")
    with pytest.raises(InputError, match="Did you mean effective_rank"):
        audit.plot("efective_rank")
    with pytest.raises(InputError, match="Did you mean mean_cosine"):
        audit.plot_depth("mean_cosin")
    with pytest.raises(InputError, match="numerical_rank of heads: expected numbers"):
        of("no_heads").plot()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(InputError, match=r"`Audit.plot`: .*pip install 'rankwise\[figures\]'"):
        audit.plot()


def test_one_of_several_stacks_is_chosen_by_name() -> None:
    audit = of("encoder_decoder")
    with pytest.raises(InputError, match=r"`stack`: expected one of 'encoder\.block', .*, got None") as error:
        audit.to_tensor("effective_rank")
    titles = re.findall(r"'(.+?)'", error.value.expected)
    assert len(titles) == 3
    for title in titles:
        assert audit.to_tensor("effective_rank", stack=title).isfinite().any()
    with pytest.raises(InputError, match=r"Did you mean encoder\.block"):
        audit.to_tensor("effective_rank", stack="encoder.blok")
    with pytest.raises(InputError, match="Did you mean row_entropy"):
        audit.to_tensor("row_entropi")
    with pytest.raises(InputError, match="`importance=True`"):
        of("no_states").to_tensor("removal_cost")


def test_layers_with_several_mixers_are_refused() -> None:
    audit = of("encoder")
    twice = [head.model_copy(update={"call": 1}) for head in audit.heads]
    with pytest.raises(InputError, match="one mixer per layer"):
        audit.model_copy(update={"heads": [*audit.heads, *twice]}).to_tensor("effective_rank")
