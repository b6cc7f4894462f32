"""Which priced setting a plan recommends, and why: each sentence from the numbers in the plan."""

import math

from rankwise._internals.records import format_number
from rankwise.plan.records import HeadDimPlan, Option

MORE, FEWER = "more heads", "fewer heads"


def recommended(options: list[Option]) -> Option:
    """The setting with as many channels in heads of the planned width, where there is one; else that of now.

    Args:
        options: of now first.
    """
    return next((option for option in options if option.name in (MORE, FEWER)), options[0])


def reason(plan: HeadDimPlan, planned: int, options: list[Option], latency_tokens: int) -> str:
    """Why, in sentences: what it gains, what it loses, and what was measured to take longer or less.

    Args:
        plan: the plan.
        planned: width to plan with.
        options: of now first.
        latency_tokens: length that was timed; 0: none was.
    """
    if not plan.saturated:
        return f"Rank does not saturate up to K = {plan.curve[-1][0]}: there is no narrower width to advise."
    low, high = plan.interval
    start = (
        f"K* = {plan.head_dim} ({low} to {high}): beyond it a unit of width adds less than "
        f"{plan.tolerance:g} of rank/T at random weights. Rounded up to {planned}"
    )
    now, best = options[0], recommended(options)
    if best is not now:
        return f"{start}. {_change(now, best)} {_latency(now, best, latency_tokens)}"
    if planned < now.head_dim:
        return (
            f"{start}, narrower than the {now.head_dim} of now; but {now.heads * now.head_dim} channels make "
            f"no more than {now.heads} heads of it: keep them, or narrow them as listed for fewer parameters "
            "and less rank."
        )
    if now.head_dim < low:
        return (
            f"{start}. The heads of now are narrower ({now.head_dim}), and their {now.heads * now.head_dim} "
            "channels make no head of that width: only a wider model has room for it."
        )
    return f"{start}, which is no narrower than the heads of now: keep them."


def _change(now: Option, best: Option) -> str:
    words = (
        f"That is {best.heads} heads in place of {now.heads} for "
        f"{best.parameters / now.parameters:.2f} times the parameters"
    )
    if math.isfinite(now.rank_share) and math.isfinite(best.rank_share):
        words += (
            f", and {best.rank_sum:.1f} T in place of {now.rank_sum:.1f} T of rank in all heads together; "
            f"each single head has {_than(best.rank_share, now.rank_share)}"
        )
    else:
        words += (
            f"; rank/T at K = {now.head_dim} lies outside the widths tried, so what it changes is not known"
        )
    before, after = now.heads * now.value_dim, best.heads * best.value_dim
    same = f"still {after}" if before == after else f"{after} in place of {before}"
    return (
        f"{words}. Values are {best.value_dim} wide a head in place of {now.value_dim}: {same} in all heads "
        "together."
    )


def _than(after: float, before: float) -> str:
    """More or less, where the digits shown say so."""
    if f"{after:.2f}" == f"{before:.2f}":
        return f"as much ({after:.2f})"
    return f"{'less' if after < before else 'more'} ({after:.2f} against {before:.2f})"


def shape_notes(width: int, best: Option) -> list[str]:
    """Which classes of transformers do not make the recommended shapes, for they do not read all values.

    Args:
        width: D.
        best: the recommended setting.
    """
    notes = []
    if best.heads * best.head_dim != width:
        refuse = (
            ""
            if width % best.heads == 0
            else f"; many refuse {best.heads} heads, which do not divide {width}"
        )
        notes.append(
            f"H·K = {best.heads * best.head_dim} is not D = {width}: classes that read head_dim (Llama, "
            f"Qwen3, Mistral) make these heads, BERT, GPT-2 and OPT make heads of D/H{refuse}."
        )
    if best.kv_heads != best.heads:
        notes.append(
            "Classes that read num_key_value_heads (Llama, Qwen3, Mistral) share keys among heads; BERT, "
            "GPT-2 and ViT make a key head for each."
        )
    if best.value_dim != best.head_dim:
        notes.append(
            "v_head_dim is DeepSeek-V3's name for the width of values. Most classes do not read it: their "
            "values are as wide as queries and keys."
        )
    return notes


def _latency(now: Option, best: Option, tokens: int) -> str:
    if not tokens:
        return "It was not timed; another number of heads can be slower."
    parts = [
        f"{name} {format_number(after, 2)} ms in place of {format_number(before, 2)} "
        f"({after / before:.2f} times)"
        for name, before, after in (
            ("prefill", now.prefill_ms, best.prefill_ms),
            ("one more token", now.decode_ms, best.decode_ms),
        )
    ]
    return f"Measured on this machine at T = {tokens:,}: {', '.join(parts)}."
