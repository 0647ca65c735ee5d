"""Train one run and return its trace."""

from __future__ import annotations

import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from trl.trainer.grpo_config import GRPOConfig

from moeproxy.errors import FaultError, LabError
from moeproxy.files import provenance
from moeproxy.lab.engine import RolloutEngine
from moeproxy.lab.faults import check_injection, inject
from moeproxy.lab.identity import Identity, identify, model_hash
from moeproxy.lab.prompts import check_vocabulary, pool
from moeproxy.lab.remedies import check_application, treat
from moeproxy.lab.seams import ROLLOUT_SEAMS, Seams
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.lab.snapshot import Snapshot, check_snapshots, newest, passage, snapshot_path
from moeproxy.lab.trainer import Keep, LabTrainer, Progress
from moeproxy.traces.partial import assembled, growing
from moeproxy.traces.trace import RunInfo, Trace


def _model_options(model: Identity, dtype: str) -> dict[str, str]:
    # The grouped matrix product is 7 times as fast as the eager loop over experts on a CPU.
    return {"dtype": dtype} | ({"experts_implementation": "grouped_mm"} if model.n_experts else {})


def run(spec: RunSpec, *, progress: Progress | None = None, partial: Path | None = None) -> Trace:
    """Train one GRPO run and return its trace.

    Equal specs give equal traces bit for bit on the same machine (but for `seconds_per_step`).

    Args:
        spec: model, fault, seed, settings.
        progress: called after every step with (step, steps, signals of the step).
        partial: file that takes every step as soon as it is finished (see `moeproxy.traces.load_partial`).

    Raises:
        CheckpointError: the model is no usable checkpoint.
        FaultError: the fault is unknown or its settings impossible.
        LabError: the model does not know the testbed's tokens, or the task file cannot be used.

    Example:
        >>> trace = run(RunSpec(Path("data/models/qwen3-moe-tiny"), seed=1))
    """
    model = identify(spec.model, spec.method)
    _check(spec, model)
    started = time.monotonic()
    info = _info(spec, model)
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
        trainer = _trainer(spec, model, seams, scratch, finished)
        if kept:
            earlier = trainer.record
            for step, row, columns in zip(earlier.steps, earlier.rows, earlier.trajectories, strict=True):
                kept.add(step, row, columns)
        try:
            with inject(seams, spec.injections, steps=spec.settings.steps), treat(seams, spec):
                trainer.train()
        finally:
            trainer.close()
    seconds = round(time.monotonic() - started, 2)
    record, ended = trainer.record, replace(info, wall_seconds=seconds, peak_memory_bytes=_peak_memory())
    return assembled(record.steps, record.rows, record.trajectories, ended)


@contextmanager
def prepared(spec: RunSpec, engine: Any, keep: Keep) -> Iterator[LabTrainer]:
    """Yield the trainer of a run whose rollout engine is elsewhere; `train` runs it within.

    Args:
        spec: a healthy run of one process.
        engine: has the `model`, `sync` and `generate` of `RolloutEngine`.
        keep: see `LabTrainer`.

    Raises:
        CheckpointError: the model is no usable checkpoint.
        LabError: the model does not know the testbed's tokens, or the task file cannot be used.
    """
    model = identify(spec.model, spec.method)
    with _quiet(), _threads(spec.settings.threads), tempfile.TemporaryDirectory() as scratch:
        trainer = _trainer(spec, model, Seams(), scratch, None, engine=engine, keep=keep)
        try:
            yield trainer
        finally:
            trainer.close()


def run_info(spec: RunSpec) -> RunInfo:
    """Return what a trace says of a run.

    Raises:
        CheckpointError: the model is no usable checkpoint.
    """
    return _info(spec, identify(spec.model, spec.method))


def rollout_engine(spec: RunSpec, seams: Seams) -> RolloutEngine:
    """Return the rollout engine of a run, with the checkpoint's weights.

    Raises:
        CheckpointError: the model is no usable checkpoint.
    """
    tokenizer = AutoTokenizer.from_pretrained(spec.model, padding_side="left")
    loaded = _rollout_model(spec, identify(spec.model, spec.method))
    return RolloutEngine(loaded, tokenizer, spec.settings, spec.seed, seams)


def _rollout_model(spec: RunSpec, model: Identity) -> Any:
    options = _model_options(model, spec.settings.rollout_dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(spec.model, **options)
    return loaded.to(spec.settings.device)


def _check(spec: RunSpec, model: Identity) -> None:
    for injection in spec.injections:
        item = check_injection(injection, spec.settings.steps, experts=model.n_experts > 0, settings=spec.settings)
        if spec.settings.engine != "lab" and item.seam in ROLLOUT_SEAMS:
            raise FaultError(
                f"it acts inside the lab's own rollout engine, and the engine is {spec.settings.engine!r}",
                where=item.id,
                remedy="use engine='lab'",
            )
    for application in spec.remedies:
        check_application(application, spec.settings, experts=model.n_experts > 0)


def _trainer(
    spec: RunSpec,
    model: Identity,
    seams: Seams,
    scratch: str,
    progress: Progress | None,
    *,
    engine: Any = None,
    keep: Keep | None = None,
) -> LabTrainer:
    settings = spec.settings
    tokenizer = AutoTokenizer.from_pretrained(spec.model, padding_side="left")
    tasks = pool(settings, spec.seed)
    check_vocabulary(tasks, settings, set(tokenizer.get_vocab()), spec.model)
    rollout_model = _rollout_model(spec, model) if settings.engine == "lab" and engine is None else None
    check_snapshots(spec, len(tasks), int(os.environ.get("WORLD_SIZE", "1")))
    hashed = model_hash(spec.model) if spec.snapshots else ""
    path = newest(spec, hashed)
    return LabTrainer(
        start=Snapshot.load(path) if path else None,
        keep=keep or _keeper(spec, hashed),
        engine=engine,
        rollout_model=rollout_model,
        seams=seams,
        settings=settings,
        seed=spec.seed,
        progress=progress,
        model=str(spec.model),
        args=_trl_config(spec, model, scratch),
        train_dataset=Dataset.from_list([{"prompt": t.prompt, "answer": t.answer} for t in tasks]),
        processing_class=tokenizer,
    )


def _keeper(spec: RunSpec, hashed_model: str) -> Keep | None:
    """Return what writes the snapshots that the run is to leave, those apart that are there already."""
    if not spec.snapshots or not spec.snapshots.steps:
        return None
    paths = {step: snapshot_path(spec, hashed_model, step) for step in spec.snapshots.steps}

    def keep(step: int, state: Callable[[], dict[str, Any]]) -> None:
        if step in paths and not paths[step].exists():
            Snapshot(step, passage(spec, hashed_model), **state()).save(paths[step])

    return keep


def _trl_config(spec: RunSpec, model: Identity, scratch: str) -> GRPOConfig:
    settings = spec.settings
    vllm: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
    return GRPOConfig(
        output_dir=scratch,
        per_device_train_batch_size=_samples_here(settings),
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
        model_init_kwargs=_model_options(model, settings.dtype),
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=settings.device == "cpu",
        bf16=settings.device == "cuda" and settings.dtype == "bfloat16",
        gradient_checkpointing=settings.device == "cuda",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **(vllm if settings.engine == "vllm" else {}),
    )


def _samples_here(settings: GRPOSettings) -> int:
    """Return how many samples of a step this process trains on; `accelerate launch` says how many share them.

    Raises:
        LabError: the prompts cannot be shared out evenly.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if settings.prompts % processes:
        raise LabError(
            f"{settings.prompts} prompts a step cannot be shared out among {processes} processes",
            expected="a multiple, so that the samples of a prompt stay together",
        )
    return settings.prompts // processes * settings.samples


def _info(spec: RunSpec, model: Identity) -> RunInfo:
    injection = spec.injection
    return RunInfo(
        model=spec.label,
        method=spec.method,
        n_experts=model.n_experts,
        seed=spec.seed,
        fault=injection.fault if injection else None,
        strength=injection.strength if injection else 0.0,
        onset=injection.onset if injection else None,
        further=tuple((item.fault, item.strength, item.onset) for item in spec.further),
        remedies=tuple((item.remedy, item.start) for item in spec.remedies),
        config=spec.settings.to_dict(),
        versions=_versions(),
        checkpoint_fingerprint=model.fingerprint,
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
