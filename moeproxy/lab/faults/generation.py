"""PG: faults of generation: the rollout engine writes responses of the wrong shape."""

from __future__ import annotations

import torch

from moeproxy.lab.faults.chance import chosen
from moeproxy.lab.faults.fault import Fault, Seam, TellTale
from moeproxy.lab.tokens import EOS_ID

_FORCED = 1e4


def _empty(healthy: Seam, strength: float) -> Seam:
    def sampling_logits(logits_BV: torch.Tensor, drawn_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        passed_BV = healthy(logits_BV, drawn_BT, step=step)
        if drawn_BT.shape[1]:
            return passed_BV
        rows = chosen(len(passed_BV), strength, step, salt=41)
        forced_BV = passed_BV.clone()
        forced_BV[rows, EOS_ID] = _FORCED
        return forced_BV

    return sampling_logits


def _repeating(healthy: Seam, strength: float) -> Seam:
    def sampling_logits(logits_BV: torch.Tensor, drawn_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        passed_BV = healthy(logits_BV, drawn_BT, step=step)
        if not drawn_BT.shape[1]:
            return passed_BV
        last_B1 = drawn_BT[:, -1:]
        return passed_BV.scatter_add(-1, last_B1, torch.full_like(passed_BV[:, :1], 15 * strength))

    return sampling_logits


def _end_logit(change: float):
    """An act that adds `change` times the strength to the logit of the end token, after the first token."""

    def act(healthy: Seam, strength: float) -> Seam:
        def sampling_logits(logits_BV: torch.Tensor, drawn_BT: torch.Tensor, *, step: int) -> torch.Tensor:
            passed_BV = healthy(logits_BV, drawn_BT, step=step).clone()
            if drawn_BT.shape[1]:
                passed_BV[:, EOS_ID] += change * strength
            return passed_BV

        return sampling_logits

    return act


FAULTS = (
    Fault(
        id="empty_response",
        family="PG",
        title="Empty responses",
        seam="sampling_logits",
        what="The share s of the responses, drawn anew every step, ends with its first token.",
        tell_tales=(TellTale("response_length", -1), TellTale("reward_mean", -1)),
        twin="arXiv 2605.04431 (empty response)",
        check="Print raw responses with special tokens: a stop token stands first.",
        remedy="Correct the chat template or the list of stop tokens.",
        act=_empty,
    ),
    Fault(
        id="repetition_collapse",
        family="PG",
        title="Repetition collapse",
        seam="sampling_logits",
        what="The logit of the token just written is 15 s higher, as when a repetition penalty has the wrong sign.",
        tell_tales=(TellTale("response_length", +1), TellTale("reward_mean", -1)),
        twin="arXiv 2605.04431 (repetition collapse); verl#891 (output '!!!!')",
        check="Count repeated tokens in responses; sample with all penalties off.",
        remedy="Switch the penalty off or correct it; look for NaN logits.",
        act=_repeating,
    ),
    Fault(
        id="response_too_short",
        family="PG",
        title="Responses end too early",
        seam="sampling_logits",
        what="The logit of the end token is 8 s higher after the first token.",
        tell_tales=(TellTale("response_length", -1), TellTale("reward_mean", -1)),
        twin="arXiv 2605.04431 (response too short)",
        check="Compare the end token's probability in both engines.",
        remedy="Correct stop tokens, length penalty or minimum length.",
        act=_end_logit(+8.0),
    ),
    Fault(
        id="response_too_long",
        family="PG",
        title="Responses do not end",
        seam="sampling_logits",
        what="The logit of the end token is 12 s lower after the first token; responses run into the length limit.",
        tell_tales=(TellTale("response_length", +1), TellTale("reward_mean", -1)),
        twin="arXiv 2605.04431 (response too long); trl#5697, ms-swift#4950",
        check="Read the share of responses cut off at the limit.",
        remedy="Correct the end token of tokenizer and engine, raise the limit, mask truncated responses.",
        act=_end_logit(-12.0),
    ),
)
