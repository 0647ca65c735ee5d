"""TE: faults of tools and environment, in the two-turn calculator (`moeproxy.lab.calculator`).

They act only where tools are called: with `environment="calculator"` in the settings of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeproxy.lab.calculator import ERROR, ToolTurn
from moeproxy.lab.faults.chance import chosen
from moeproxy.lab.faults.fault import Fault, Seam, TellTale


def _on_a_share(change, salt: int):
    """An act that applies `change` to the share s of the turns, drawn anew every step."""

    def act(healthy: Seam, strength: float) -> Seam:
        def tool_turns(turns: Sequence[ToolTurn], *, step: int) -> Sequence[ToolTurn]:
            passed = healthy(turns, step=step)
            hit = chosen(len(passed), strength, step, salt).tolist()
            return [change(turn) if bad else turn for turn, bad in zip(passed, hit, strict=True)]

        return tool_turns

    return act


def _failing(turn: ToolTurn) -> ToolTurn:
    return replace(turn, result=ERROR)


def _corrupted(turn: ToolTurn) -> ToolTurn:
    """Turn every digit d of the result into 9 - d: a wrong number that reads like a right one."""
    wrong = "".join(str(9 - int(c)) if c.isdigit() else c for c in turn.result)
    return replace(turn, result=wrong)


def _ended(turn: ToolTurn) -> ToolTurn:
    return replace(turn, done=True)


FAULTS = (
    Fault(
        id="tool_call_error",
        family="TE",
        title="Tool calls fail",
        seam="tool_turns",
        what="The share s of the tool calls, drawn anew every step, is answered by an error.",
        tell_tales=(TellTale("tool_error_rate", +1), TellTale("reward_mean", -1)),
        twin="arXiv 2605.04431 (tool-call error)",
        check="Send the logged calls to the tool again: they succeed.",
        remedy="Retry calls, and mask responses whose tool failed instead of scoring them.",
        act=_on_a_share(_failing, 61),
    ),
    Fault(
        id="observation_corruption",
        family="TE",
        title="Wrong tool results",
        seam="tool_turns",
        what="In the share s of the tool calls, drawn anew every step, each digit d of the result arrives as 9 - d.",
        tell_tales=(TellTale("reward_mean", -1),),
        twin="arXiv 2605.04431 (observation corruption)",
        check="Compute the logged calls again and compare with the logged results.",
        remedy="Check results where they enter the context (length, encoding, the call they belong to).",
        act=_on_a_share(_corrupted, 67),
    ),
    Fault(
        id="termination_error",
        family="TE",
        title="Episodes end too early",
        seam="tool_turns",
        what="The share s of the episodes that call the tool, drawn anew every step, ends with the call: no result and "
        "no answer.",
        tell_tales=(TellTale("response_length", -1), TellTale("reward_mean", -1)),
        twin="arXiv 2605.04431 (termination error)",
        check="Count the turns of logged episodes: some end with a call.",
        remedy="Correct the environment's end condition and turn limit; mask episodes cut by it.",
        act=_on_a_share(_ended, 71),
    ),
)
