"""GRPO on TRL's trainer with a separate rollout engine, named seams, and a record of every step.

TRL is pinned: the methods overridden here (`_generate_and_score_completions`, `_compute_loss`,
`_get_per_token_logps_and_entropies`) are internal to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from accelerate import skip_first_batches
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from moeproxy.lab import probes
from moeproxy.lab.balance import load_balancing_loss, routers_watched
from moeproxy.lab.engine import RolloutEngine
from moeproxy.lab.episode import Rollouts
from moeproxy.lab.prompts import scorer
from moeproxy.lab.replay import replayed
from moeproxy.lab.seams import Batch, Coefficients, Seams, Update
from moeproxy.lab.settings import GRPOSettings
from moeproxy.lab.shares import gathered
from moeproxy.lab.snapshot import Snapshot, random_state, restore_random

Row = dict[str, float]
Progress = Callable[[int, int, Row], None]
Keep = Callable[[int, Callable[[], dict[str, Any]]], None]


class Record:
    """The rows of a run: one a step, and one list a step for each trajectory column.

    Args:
        before: `steps`, `rows` and `trajectories` of the steps that are done already.
    """

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        earlier = before or {}
        self.steps: list[int] = list(earlier.get("steps", ()))
        self.rows: list[Row] = list(earlier.get("rows", ()))
        self.trajectories: list[dict[str, list[float]]] = list(earlier.get("trajectories", ()))
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
        rollout_model: the rollout engine's own instance of the model; None where vLLM or `engine` generates.
        seams: where faults act.
        settings: of the loop.
        seed: of the rollout engine's sampling.
        progress: called after every step with (step, steps, signals).
        start: state to go on from, of a run of the same model, seed and settings.
        keep: called after every step with the step and a function that returns the state then.
        engine: a rollout engine elsewhere, in place of one with `rollout_model`: it has `model`, `sync` and `generate`
            of `RolloutEngine`.
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
        start: Snapshot | None = None,
        keep: Keep | None = None,
        engine: Any = None,
        **kwargs: Any,
    ) -> None:
        self._seams, self._settings, self._progress = seams, settings, progress
        self._start, self._keep = start, keep
        self._judge = scorer(settings)
        score: Any = self._score  # TRL's type for reward functions names no keyword but it passes them all
        rollout: Any = self._rollout if rollout_model is not None or engine is not None else None
        super().__init__(reward_funcs=score, rollout_func=rollout, **kwargs)
        self.record = Record(start.record if start else {})
        self._trained_logprobs = torch.empty(0)
        self._made = Rollouts([], [], [])
        self._finite = True
        trained: Any = self.model
        self._change = probes.WeightChange(trained.parameters())
        self._load = probes.RouterLoad(trained)
        tokenizer: Any = self.processing_class
        self._engine: Any = engine
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
        self._seams.sync(partial(self._engine.sync, self.accelerator.unwrap_model(self.model)), step=step)
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
        batch = Batch(self._rewards, self._settings.samples, self._made.turns or (), self._cut_off())
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
        self._correct(out, sampled, written_BT)
        return out

    def _correct(self, out: dict[str, Any], sampled_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Choose the old log-probs of the importance ratio and the weights of tokens."""
        chosen = self._seams.correction(partial(self._score_again, out), sampled_BT, mask_BT, step=self.lab_step)
        if chosen.old_BT is None:
            del out["old_per_token_logps"]  # TRL takes the trainer's own, without a second pass
        else:
            out["old_per_token_logps"] = chosen.old_BT
        if chosen.weight_BT is not None:
            out["advantages"] = out["advantages"].unsqueeze(1) * chosen.weight_BT

    @torch.no_grad()
    def _score_again(self, out: dict[str, Any]) -> torch.Tensor:
        """Return the trainer's log-probs (B, T) of the sampled tokens before the update."""
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
        with self._replay(self.model, out):
            return self._get_per_token_logps_and_entropies(self.model, ids, mask, out["completion_ids"].shape[1])[0]

    def _replay(self, model: Any, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        return replayed(model, self._seams.replay(inputs.get("rollout_choices"), step=self.lab_step))

    def _cut_off(self) -> list[bool]:
        tokenizer: Any = self.processing_class
        return probes.cut_off(self._made, self._limit, tokenizer.eos_token_id)

    @property
    def _limit(self) -> int:
        return self._seams.response_limit(self._settings.max_new_tokens, step=self.lab_step)

    def _record_responses(self, out: dict[str, Any], written_BT: torch.Tensor) -> None:
        responses = [ids[mask.bool()].tolist() for ids, mask in zip(out["completion_ids"], written_BT, strict=True)]
        self.record.add(response_length=sum(map(len, responses)) / len(responses))
        tools: dict[str, list[float]] = {}
        if self._made.turns is not None:
            tokenizer: Any = self.processing_class
            tools = probes.tool_columns(self._made, self._limit, tokenizer.eos_token_id)
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
        with self._replay(model, inputs), routers_watched(model if chosen.balance else None) as routed:
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
        if self._made.turns is not None and "rollout_choices" in inputs:
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

    def get_train_dataloader(self) -> Any:
        """Return the prompts, without those of the steps that are done."""
        loader = super().get_train_dataloader()
        return skip_first_batches(loader, self._start.step) if self._start else loader

    def capture(self) -> dict[str, Any]:
        """Return what decides all further steps, as `Snapshot` holds it; tensors are not copied."""
        trained, record = self.accelerator.unwrap_model(self.model), self.record
        optimizer: Any = self.optimizer
        return {
            "weights": trained.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rollout": self._engine.model.state_dict(),
            "random": random_state(range(torch.cuda.device_count() if self._settings.device == "cuda" else 0)),
            "record": {"steps": record.steps, "rows": record.rows, "trajectories": record.trajectories},
        }

    def start_from(self, start: Snapshot) -> None:
        """Let `train`, which must not have begun, go on from a state that was not there when the trainer was made."""
        self._start, self.record = start, Record(start.record)

    def resume(self) -> None:
        """Go on from the state given as `start`; the generators follow when the first step begins."""
        if self._start is None:
            return
        optimizer: Any = self.optimizer
        self.accelerator.unwrap_model(self.model).load_state_dict(self._start.weights)
        optimizer.load_state_dict(self._start.optimizer)
        self._engine.model.load_state_dict(self._start.rollout)
        self._change.measure()  # the way from the checkpoint to here is no update
        self.state.global_step = self._step = self._start.step

    def close(self) -> None:
        """Remove the probes' hooks."""
        self._load.close()


class _Clock(TrainerCallback):
    """Times each step and closes its row."""

    def __init__(self, trainer: LabTrainer) -> None:
        self._trainer = trainer
        self._started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.resume()

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        start = self._trainer._start
        if start and state.global_step == start.step:
            restore_random(start.random)  # here: what lies between loading and the first step draws numbers too
        self._started = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        trainer = self._trainer
        trainer.record.add(seconds_per_step=time.perf_counter() - self._started)
        row = trainer.record.close_step(state.global_step, trainer.accelerator.num_processes)
        if trainer._keep:
            trainer._keep(state.global_step, trainer.capture)
        if trainer._progress:
            trainer._progress(state.global_step, trainer._settings.steps, row)
