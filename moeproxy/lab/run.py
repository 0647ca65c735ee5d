"""Train one run and return its trace."""

from __future__ import annotations

import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from trl.trainer.grpo_config import GRPOConfig

from moeproxy.errors import LabError
from moeproxy.files import provenance
from moeproxy.lab.calculator import TOOL_CHARACTERS, interleaved, sample_calculators
from moeproxy.lab.faults import check_injection, inject
from moeproxy.lab.identity import Identity, identify
from moeproxy.lab.seams import Seams
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.tasks import RL_SKILLS, Task, sample_many
from moeproxy.lab.trainer import LabTrainer, Progress
from moeproxy.traces.trace import RunInfo, Trace


def _model_options(model: Identity) -> dict[str, str]:
    # The grouped matrix product is 7 times as fast as the eager loop over experts on a CPU.
    return {"dtype": "float32"} | ({"experts_implementation": "grouped_mm"} if model.n_experts else {})


def run(spec: RunSpec, *, progress: Progress | None = None) -> Trace:
    """Train one GRPO run on the testbed's arithmetic and return its trace.

    Equal specs give equal traces bit for bit on the same machine (but for `seconds_per_step`).

    Args:
        spec: model, fault, seed, settings.
        progress: called after every step with (step, steps, signals of the step).

    Raises:
        CheckpointError: the model is no usable checkpoint.
        FaultError: the fault is unknown or its settings impossible.
        LabError: the model does not know the testbed's tokens.

    Example:
        >>> trace = run(RunSpec(Path("data/models/qwen3-moe-tiny"), seed=1))
    """
    model = identify(spec.model, spec.method)
    for injection in spec.injections:
        check_injection(injection, spec.settings.steps, experts=model.n_experts > 0)
    started = time.monotonic()
    with _quiet(), _threads(spec.settings.threads), tempfile.TemporaryDirectory() as scratch:
        seams = Seams()
        trainer = _trainer(spec, model, seams, scratch, progress)
        try:
            with inject(seams, spec.injections, steps=spec.settings.steps):
                trainer.train()
        finally:
            trainer.close()
    return _trace(spec, model, trainer, time.monotonic() - started)


def _trainer(spec: RunSpec, model: Identity, seams: Seams, scratch: str, progress: Progress | None) -> LabTrainer:
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    tasks, characters = _tasks(spec)
    unknown = characters - set(tokenizer.get_vocab())
    if unknown:
        raise LabError(
            f"the tokenizer lacks the characters {''.join(sorted(unknown))!r} of the testbed's tasks",
            where=spec.model,
            expected="a testbed model or a proxy of one",
        )
    return LabTrainer(
        rollout_model=AutoModelForCausalLM.from_pretrained(spec.model, **_model_options(model)),
        seams=seams,
        settings=spec.settings,
        seed=spec.seed,
        progress=progress,
        model=str(spec.model),
        args=_trl_config(spec, model, scratch),
        train_dataset=Dataset.from_list([{"prompt": t.prompt, "answer": t.answer} for t in tasks]),
        processing_class=tokenizer,
    )


def _tasks(spec: RunSpec) -> tuple[list[Task], set[str]]:
    """Return the prompt pool and the characters that the model must know."""
    settings = spec.settings
    tools = settings.environment == "calculator"
    n = settings.tasks // 2 if tools else settings.tasks
    tasks = sample_many(n, seed=settings.task_seed, split="rl", skills=RL_SKILLS)
    if tools:
        tasks = interleaved(tasks, sample_calculators(n, seed=settings.task_seed, split="rl"), spec.seed)
    return tasks, {c for task in tasks for c in task.prompt} | set(TOOL_CHARACTERS if tools else "")


def _trl_config(spec: RunSpec, model: Identity, scratch: str) -> GRPOConfig:
    settings = spec.settings
    return GRPOConfig(
        output_dir=scratch,
        per_device_train_batch_size=settings.prompts * settings.samples,
        num_generations=settings.samples,
        max_completion_length=settings.max_new_tokens,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        beta=settings.beta,
        temperature=settings.temperature,
        loss_type="dapo",
        shuffle_dataset=settings.environment != "calculator",  # its pool comes shuffled, in equal parts
        seed=spec.seed,
        model_init_kwargs=_model_options(model),
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )


def _trace(spec: RunSpec, model: Identity, trainer: LabTrainer, seconds: float) -> Trace:
    record = trainer.record
    steps = pd.DataFrame(record.rows, index=pd.Index(record.steps, name="step"))
    trajectories = pd.concat(
        [pd.DataFrame({"step": step, **rows}) for step, rows in zip(record.steps, record.trajectories, strict=True)],
        ignore_index=True,
    )
    injection = spec.injection
    info = RunInfo(
        model=spec.label,
        method=spec.method,
        n_experts=model.n_experts,
        seed=spec.seed,
        fault=injection.fault if injection else None,
        strength=injection.strength if injection else 0.0,
        onset=injection.onset if injection else None,
        further=tuple((item.fault, item.strength, item.onset) for item in spec.further),
        config=spec.settings.to_dict(),
        versions=_versions(),
        checkpoint_fingerprint=model.fingerprint,
        wall_seconds=round(seconds, 2),
        peak_memory_bytes=_peak_memory(),
    )
    return Trace(steps, trajectories, info)


def _peak_memory() -> int:
    """Return the largest resident size of this process in bytes; `sweep` gives every run a process of its own."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _versions() -> dict[str, str]:
    found: Any = provenance()["versions"]
    return dict(found)


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what TRL and transformers say about a run that is set up on purpose as it is."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, hence the pin
    disable_progress_bars()
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    loggers = [logging.getLogger(name) for name in ("trl", "accelerate")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
