"""The rollout engine: its own copy of the weights, its own dtype, and the log-probabilities it sampled with.

Real systems generate with another program than they train with, and most real faults live in that gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from moeproxy.lab.episode import Rollouts, Turn, one_turn, play
from moeproxy.lab.rollout_hooks import RolloutHooks, SamplingSeam
from moeproxy.lab.seams import Seams
from moeproxy.lab.settings import GRPOSettings


class RolloutEngine:
    """Generates with its own copy of a model.

    Args:
        model: the engine's own instance, cast to `settings.rollout_dtype` and never trained. Not a deep copy of the
            trainer's: TRL patches the forward of its model with a closure that a copy would go on calling.
        tokenizer: pads on the left.
        settings: sampling temperature, response length, dtypes.
        seed: with the step it seeds sampling, so that a healthy and a faulty run draw the same random numbers.
        seams: the places where faults act.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: GRPOSettings,
        seed: int,
        seams: Seams,
    ) -> None:
        self.model = model.to(getattr(torch, settings.rollout_dtype)).eval().requires_grad_(False)
        self._tokenizer, self._settings, self._seed, self._seams = tokenizer, settings, seed, seams
        self._attention: list[Any] = [m for m in self.model.modules() if isinstance(getattr(m, "scaling", None), float)]
        self._scales: list[float] = [module.scaling for module in self._attention]
        self._eos: Any = tokenizer.eos_token_id
        self._devices = [self.model.device] if self.model.device.type == "cuda" else []
        self._hooks = RolloutHooks(self.model, seams)

    @torch.no_grad()
    def sync(self, trained: nn.Module, dtype: str | None = None) -> None:
        """Copy the trainer's parameters, sent as `dtype` (`settings.sync_dtype`), and its buffers as they are."""
        sent = getattr(torch, dtype or self._settings.sync_dtype)
        source = dict(trained.named_parameters())
        for name, mine in self.model.named_parameters():
            mine.copy_(source[name].to(sent))
        buffers = dict(trained.named_buffers())
        for name, mine in self.model.named_buffers():
            mine.copy_(buffers[name])

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], *, step: int, share: int = 0) -> Rollouts:
        """Sample one response for each of `prompts` (B*G strings).

        Where the prompts of a step are shared out, the number of the share seeds sampling too.
        """
        for module, scale in zip(self._attention, self._scales, strict=True):
            module.scaling = self._seams.attention_scale(scale, step=step)
        self._hooks.step = step
        self._seams.rollout_weights(self.model, step=step)
        prompt_ids = self._tokenizer(list(prompts))["input_ids"]
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(1_000_003 * (self._seed + 1) + step + 611_953 * share)
            if self._settings.environment == "calculator":
                answer_calls = partial(self._seams.tool_turns, step=step)
                return play(partial(self._turn, step=step), self._tokenizer, prompt_ids, answer_calls)
            return one_turn(prompt_ids, self._turn(prompt_ids, (self._eos,), step=step))

    def _turn(self, prompt_ids: Sequence[list[int]], stops: Sequence[int], *, step: int) -> Turn:
        """Sample until one of the tokens `stops` or the length limit."""
        ids_BT, mask_BT = self._left_padded(prompt_ids)
        seam = SamplingSeam(self._seams, step, ids_BT.shape[1])
        self._hooks.chosen.clear()
        limit = self._seams.response_limit(self._settings.max_new_tokens, step=step)
        tokens_BT = self._sample(ids_BT, mask_BT, stops, seam, limit)[:, ids_BT.shape[1] :]
        choices_BTLK = self._hooks.take_choices(len(ids_BT)).cpu()
        logprobs_BT = self._logprobs(seam.logits, tokens_BT)
        ended_BT = torch.isin(tokens_BT, torch.tensor(stops, device=tokens_BT.device))
        first_end = torch.where(ended_BT.any(1), ended_BT.int().argmax(1), tokens_BT.shape[1] - 1)
        lengths = (first_end + 1).tolist()
        return Turn(
            ids=[row[:n].tolist() for row, n in zip(tokens_BT, lengths, strict=True)],
            logprobs=[row[:n].tolist() for row, n in zip(logprobs_BT, lengths, strict=True)],
            choices=[
                choices_TLK[ids_BT.shape[1] - len(prompt) :][: len(prompt) + n - 1]
                for choices_TLK, prompt, n in zip(choices_BTLK, prompt_ids, lengths, strict=True)
            ],
        )

    def _left_padded(self, rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        pad: Any = self._tokenizer.pad_token_id
        width = max(map(len, rows))
        ids_BT = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
        mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return ids_BT.to(self.model.device), mask_BT.to(self.model.device)

    def _sample(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, stops: Sequence[int], seam: SamplingSeam, limit: int
    ) -> torch.Tensor:
        model: Any = self.model  # transformers types generate by mixins that a type checker cannot follow
        return model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=limit,
            do_sample=True,
            temperature=self._settings.temperature,
            top_k=0,
            top_p=1.0,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=list(stops),
            logits_processor=LogitsProcessorList([seam]),
        )

    def _logprobs(self, logits: Sequence[torch.Tensor], tokens_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV = torch.stack(list(logits), dim=1).float() / self._settings.temperature
        return logits_BTV.log_softmax(-1).gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1)
