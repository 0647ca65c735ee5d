"""Remedies in tools and environment, and the one that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from moeproxy.lab.calculator import ToolTurn, answer_call
from moeproxy.lab.remedies.treatment import Act, Seam, Treatment, always

_TRIES = 3


def _retried(seam: Seam) -> Seam:
    def tool_turns(turns: Sequence[ToolTurn], *, step: int) -> Sequence[ToolTurn]:
        answered = list(seam(turns, step=step))
        for _ in range(_TRIES):
            failed = [i for i, turn in enumerate(answered) if turn.failed]
            if not failed:
                break
            again = seam([turns[i] for i in failed], step=step)
            answered = [dict(zip(failed, again, strict=True)).get(i, turn) for i, turn in enumerate(answered)]
        return answered

    return tool_turns


def _changed(change: Callable[[ToolTurn], ToolTurn]) -> Act:
    def act(seam: Seam) -> Seam:
        return lambda turns, *, step: [change(turn) for turn in seam(turns, step=step)]

    return act


REMEDIES = (
    Treatment(
        id="restart",
        kind="mitigation",
        title="Restart from before the onset",
        what="Nothing is changed: the run starts again from the snapshot. It helps against what does not come again.",
        source="arXiv 2512.22492 (restart of the failed role)",
        seams=(),
        plan=lambda _settings: {},
    ),
    Treatment(
        id="retry_calls",
        kind="mitigation",
        title="Tool calls retried",
        what=f"A call that is answered by an error is sent again, up to {_TRIES} times.",
        source="arXiv 2605.04431 (tool-call error)",
        seams=("tool_turns",),
        plan=always(_retried, "tool_turns"),
    ),
    Treatment(
        id="local_tool",
        kind="repair",
        title="Another tool",
        what="Calls are answered by a calculator of one's own.",
        source="arXiv 2605.04431 (tool-call error, observation corruption)",
        seams=("tool_turns",),
        plan=always(_changed(lambda turn: replace(turn, result=answer_call(turn.call).result)), "tool_turns"),
    ),
    Treatment(
        id="continue_episodes",
        kind="repair",
        title="Right end of episodes",
        what="An episode does not end at a call.",
        source="arXiv 2605.04431 (termination error)",
        seams=("tool_turns",),
        plan=always(_changed(lambda turn: replace(turn, done=False)), "tool_turns"),
    ),
)
