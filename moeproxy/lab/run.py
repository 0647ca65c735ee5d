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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from trl.trainer.grpo_config import GRPOConfig

from moeproxy.errors import LabError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.files import provenance
from moeproxy.lab.faults import check_injection, inject
from moeproxy.lab.seams import Seams
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.tasks import RL_SKILLS, sample_many
from moeproxy.lab.trainer import LabTrainer, Progress
from moeproxy.traces.partial import assembled, growing
from moeproxy.traces.trace import RunInfo, Trace

# The grouped matrix product is 7 times as fast as the eager loop over experts on a CPU.
_MODEL_OPTIONS = {"dtype": "float32", "experts_implementation": "grouped_mm"}


def run(spec: RunSpec, *, progress: Progress | None = None, partial: Path | None = None) -> Trace:
    """Train one GRPO run on the testbed's arithmetic and return its trace.

    Equal specs give equal traces bit for bit on the same machine (but for `seconds_per_step`).

    Args:
        spec: model, fault, seed, settings.
        progress: called after every step with (step, steps, signals of the step).
        partial: file that takes every step as soon as it is finished (see `moeproxy.traces.load_partial`).

    Raises:
        CheckpointError: the model is no usable checkpoint.
        FaultError: the fault is unknown or its settings impossible.
        LabError: the model does not know the testbed's tokens.

    Example:
        >>> trace = run(RunSpec(Path("data/models/qwen3-moe-tiny"), seed=1))
    """
    checkpoint = Checkpoint.open(spec.model)
    for injection in spec.injections:
        check_injection(injection, spec.settings.steps)
    started = time.monotonic()
    info = _info(spec, checkpoint)
    with (
        _quiet(),
        _threads(spec.settings.threads),
        tempfile.TemporaryDirectory() as scratch,
        growing(partial, info) as kept,
    ):

        def finished(step: int, steps: int, row: dict[str, float]) -> None:
            if kept:
                kept.add(step, row, trainer.record.trajectories[-1])
            if progress:
                progress(step, steps, row)

        seams = Seams()
        trainer = _trainer(spec, seams, scratch, finished)
        try:
            with inject(seams, spec.injections, steps=spec.settings.steps):
                trainer.train()
        finally:
            trainer.close()
    seconds = round(time.monotonic() - started, 2)
    record, ended = trainer.record, replace(info, wall_seconds=seconds, peak_memory_bytes=_peak_memory())
    return assembled(record.steps, record.rows, record.trajectories, ended)


def _trainer(spec: RunSpec, seams: Seams, scratch: str, progress: Progress | None) -> LabTrainer:
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    tasks = sample_many(spec.settings.tasks, seed=spec.settings.task_seed, split="rl", skills=RL_SKILLS)
    unknown = {c for task in tasks for c in task.prompt} - set(tokenizer.get_vocab())
    if unknown:
        raise LabError(
            f"the tokenizer lacks the characters {''.join(sorted(unknown))!r} of the testbed's tasks",
            where=spec.model,
            expected="a testbed model or a proxy of one",
        )
    return LabTrainer(
        rollout_model=AutoModelForCausalLM.from_pretrained(spec.model, **_MODEL_OPTIONS),
        seams=seams,
        settings=spec.settings,
        seed=spec.seed,
        progress=progress,
        model=str(spec.model),
        args=_trl_config(spec, scratch),
        train_dataset=Dataset.from_list([{"prompt": t.prompt, "answer": t.answer} for t in tasks]),
        processing_class=tokenizer,
    )


def _trl_config(spec: RunSpec, scratch: str) -> GRPOConfig:
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
        seed=spec.seed,
        model_init_kwargs=dict(_MODEL_OPTIONS),
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )


def _info(spec: RunSpec, checkpoint: Checkpoint) -> RunInfo:
    injection = spec.injection
    return RunInfo(
        model=spec.label,
        method=spec.method,
        n_experts=checkpoint.n_experts,
        seed=spec.seed,
        fault=injection.fault if injection else None,
        strength=injection.strength if injection else 0.0,
        onset=injection.onset if injection else None,
        further=tuple((item.fault, item.strength, item.onset) for item in spec.further),
        config=asdict(spec.settings),
        versions=_versions(),
        checkpoint_fingerprint=checkpoint.fingerprint,
    )


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
