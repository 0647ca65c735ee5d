"""GRPO on TRL's trainer with a separate rollout engine, named seams, and a record of every step.

TRL is pinned: the methods overridden here (`_generate_and_score_completions`, `_compute_loss`,
`_get_per_token_logps_and_entropies`) are internal to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from moeproxy.lab import probes
from moeproxy.lab.balance import load_balancing_loss, routers_watched
from moeproxy.lab.engine import RolloutEngine
from moeproxy.lab.episode import Rollouts
from moeproxy.lab.prompts import scorer
from moeproxy.lab.seams import Batch, Coefficients, Seams, Update
from moeproxy.lab.settings import GRPOSettings
from moeproxy.lab.shares import gathered

Row = dict[str, float]
Progress = Callable[[int, int, Row], None]


class Record:
    """The rows of a run: one a step, and one list a step for each trajectory column."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rows: list[Row] = []
        self.trajectories: list[dict[str, list[float]]] = []
        self._row: Row = {}

    def add(self, **values: float) -> None:
        """Add signals to the step under way."""
        self._row.update(values)

    def close_step(self, step: int, n_processes: int = 1) -> Row:
        """End the step under way and return its signals, those of all processes together."""
        row, self.trajectories[-1] = gathered(self._row, self.trajectories[-1], n_processes)
        self.steps.append(step)
        self.rows.append(row)
        self._row = {}
        return row


class LabTrainer(GRPOTrainer):
    """TRL's GRPO trainer with moeproxy's seams and probes.

    The rollout engine's log-probs are the old log-probs of the importance ratio (verl calls it bypass mode), so a
    mismatch between the engines reaches the loss, as it does in real systems.

    Args:
        rollout_model: the rollout engine's own instance of the model; None where TRL's vLLM generates.
        seams: where faults act.
        settings: of the loop.
        seed: of the rollout engine's sampling.
        progress: called after every step with (step, steps, signals).
        kwargs: TRL's own arguments.
    """

    def __init__(
        self,
        *,
        rollout_model: PreTrainedModel | None,
        seams: Seams,
        settings: GRPOSettings,
        seed: int,
        progress: Progress | None,
        **kwargs: Any,
    ) -> None:
        self._seams, self._settings, self._progress = seams, settings, progress
        self._judge = scorer(settings)
        score: Any = self._score  # TRL's type for reward functions names no keyword but it passes them all
        rollout: Any = self._rollout if rollout_model is not None else None
        super().__init__(reward_funcs=score, rollout_func=rollout, **kwargs)
        self.record = Record()
        self._trained_logprobs = torch.empty(0)
        self._made = Rollouts([], [], [])
        self._finite = True
        trained: Any = self.model
        self._change = probes.WeightChange(trained.parameters())
        self._load = probes.RouterLoad(trained)
        tokenizer: Any = self.processing_class
        if rollout_model is not None:
            self._engine = RolloutEngine(rollout_model, tokenizer, settings, seed, seams)
        self.remove_callback(PrinterCallback)  # it prints the last metrics to the reader's notebook
        self.add_callback(_Clock(self))

    @property
    def lab_step(self) -> int:
        """The step under way, from 1."""
        return self.state.global_step + 1

    def _rollout(self, prompts: list[str], _trainer: GRPOTrainer) -> dict[str, list]:
        step = self.lab_step
        self._seams.sync(lambda: self._engine.sync(self.accelerator.unwrap_model(self.model)), step=step)
        made = self._engine.generate(prompts, step=step)
        self._made = made
        further = {"env_mask": made.env_mask, "final": made.final} if made.env_mask else {}
        return {
            "prompt_ids": made.prompt_ids,
            "completion_ids": made.completion_ids,
            "logprobs": made.logprobs,
            **further,
        }

    def _score(self, completions: list[str], answer: list[str], **further: Any) -> list[float]:
        texts = further.get("final", completions)  # with tools the last turn holds the answer
        rewards = [self._judge(text, right) for text, right in zip(texts, answer, strict=True)]
        rewards = self._seams.reward(rewards, texts, answer, step=self.lab_step)
        self.record.add(**probes.group_signals(rewards, self._settings.samples))
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        sampled = self._seams.sampled_logprobs(out["sampling_per_token_logps"], step=self.lab_step)
        out["sampling_per_token_logps"] = out["old_per_token_logps"] = sampled
        batch = Batch(self._rewards, self._settings.samples)
        out["advantages"] = self._seams.advantages(out["advantages"], batch, step=self.lab_step)
        written_BT = out["completion_mask"] * out["tool_mask"] if "tool_mask" in out else out["completion_mask"]
        mask_BT = self._seams.loss_mask(written_BT, step=self.lab_step)
        if mask_BT is not out["completion_mask"]:
            # TRL multiplies the two in the loss; only the first reaches the attention.
            out["tool_mask"] = mask_BT
        out["written_mask"] = written_BT  # TRL shuffles the rows of every tensor in here alike
        if self._made.choices is not None:
            width = out["prompt_ids"].shape[1]
            out["rollout_choices"] = probes.placed_choices(self._made, width, width + written_BT.shape[1])
        self._record_responses(out, written_BT)
        return out

    def _record_responses(self, out: dict[str, Any], written_BT: torch.Tensor) -> None:
        responses = [ids[mask.bool()].tolist() for ids, mask in zip(out["completion_ids"], written_BT, strict=True)]
        self.record.add(response_length=sum(map(len, responses)) / len(responses))
        tools: dict[str, list[float]] = {}
        if self._made.turns is not None:
            tokenizer: Any = self.processing_class
            tools = probes.tool_columns(self._made, self._settings.max_new_tokens, tokenizer.eos_token_id)
            self.record.add(**probes.tool_signals(tools))
        self.record.trajectories.append(
            {
                "prompt": [i // self._settings.samples for i in range(len(responses))],
                "reward": self._rewards,
                "length": [len(ids) for ids in responses],
                "repetition_ratio": [probes.repetition_ratio(ids) for ids in responses],
                "advantage": out["advantages"].flatten().tolist(),
                **tools,
            }
        )

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kw: Any
    ):
        training = torch.is_grad_enabled()
        self._load.watch(attention_mask if training else None)
        out = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kw)
        self._load.watch(None)
        if training:
            self._trained_logprobs = out[0].detach()
        return out

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        healthy = Coefficients(self._settings.beta)
        chosen = self._seams.coefficients(healthy, step=self.lab_step)
        self.beta, self.entropy_coef = chosen.beta, chosen.entropy
        self._entropy_bonus_enabled = chosen.entropy != 0
        with routers_watched(model if chosen.balance else None) as routed:
            loss = super()._compute_loss(model, inputs)
        if chosen.balance:
            mask_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            loss = loss + chosen.balance * load_balancing_loss(routed, mask_BT)
        logged = {name: values[-1] for name, values in self._metrics["train"].items() if values}
        parts = {"kl": logged["kl"]} if self.beta else {}
        rest = self.beta * parts.get("kl", 0.0)
        if self.aux_loss_enabled:
            parts["aux_loss"] = logged["aux_loss"]
            rest += self.router_aux_loss_coef * logged["aux_loss"]
        # With TRL's token-mean loss (dapo, one batch a step) the parts add up exactly.
        self.record.add(total_loss=loss.item(), policy_loss=loss.item() - rest, **parts)
        self.record.add(
            entropy=logged["entropy"],
            clip_fraction_low=logged["clip_ratio/low_mean"],
            clip_fraction_high=logged["clip_ratio/high_mean"],
        )
        sampled = inputs["sampling_per_token_logps"]
        self.record.add(**probes.mismatch(self._trained_logprobs, sampled, inputs["written_mask"]))
        self.record.add(**self._load.signals())
        if "rollout_choices" in inputs:
            self.record.add(**probes.mismatch_details(self._trained_logprobs, sampled, inputs["written_mask"]))
            self.record.add(**self._load.agreement(inputs["rollout_choices"]))
        self._metrics["train"].clear()
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        named = list(self.accelerator.unwrap_model(self.model).named_parameters())
        self._seams.gradients(named, step=self.lab_step)
        norms = probes.gradient_norms(named)
        self.record.add(**norms)
        self._finite = math.isfinite(norms["grad_norm"])
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer: Any = super().create_optimizer(*args, **kwargs)
        update = optimizer.step

        def step(*step_args: Any, **step_kwargs: Any) -> None:
            # As frameworks do it: a step whose gradients are not finite is left out.
            if self._finite:
                whole = Update(lambda: update(*step_args, **step_kwargs), optimizer)
                self._seams.optimizer_step(whole, step=self.lab_step)
            self.record.add(update_norm=self._change.measure())

        optimizer.step = step
        return optimizer

    def close(self) -> None:
        """Remove the probes' hooks."""
        self._load.close()


class _Clock(TrainerCallback):
    """Times each step and closes its row."""

    def __init__(self, trainer: LabTrainer) -> None:
        self._trainer = trainer
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        trainer = self._trainer
        trainer.record.add(seconds_per_step=time.perf_counter() - self._started)
        row = trainer.record.close_step(state.global_step, trainer.accelerator.num_processes)
        if trainer._progress:
            trainer._progress(state.global_step, trainer._settings.steps, row)
