"""What decides a GRPO run: settings of the loop, and the run's own identity."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from moeproxy.errors import LabError

DTYPES = ("float32", "bfloat16", "float16")
ENVIRONMENTS = ("arithmetic", "calculator", "file")
ENGINES = ("lab", "vllm")
# Left out of stored settings at these values, so that content keys of earlier runs stay as they are.
_ADDED_LATER = {
    "environment": "arithmetic",
    "task_file": "",
    "device": "cpu",
    "dtype": "float32",
    "engine": "lab",
}
_CHOICES = {
    "rollout_dtype": DTYPES,
    "sync_dtype": DTYPES,
    "dtype": DTYPES,
    "environment": ENVIRONMENTS,
    "device": ("cpu", "cuda"),
    "engine": ENGINES,
}


_WHOLE = ("steps", "prompts", "samples", "max_new_tokens", "tasks", "task_seed", "threads")


def _check_number(name: str, value: Any, *, whole: bool = False, finite: bool = True) -> None:
    kind = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kind) or (finite and not math.isfinite(value)):
        raise LabError(f"{name} is {value!r}", expected="a whole number" if whole else "a finite number")


@dataclass(frozen=True)
class GRPOSettings:
    """Settings of the two-engine GRPO loop.

    Args:
        steps: optimizer steps.
        prompts, samples: prompts a step, and samples a prompt (the group of GRPO).
        learning_rate: of AdamW, constant.
        beta: weight of the KL term against the reference model (the checkpoint the run started from).
        temperature: of sampling, in rollout and training alike.
        max_new_tokens: longest response in tokens, the end token included; in `calculator`, of each turn.
        rollout_dtype: dtype in which the rollout engine computes.
        sync_dtype: dtype in which weights travel from trainer to rollout engine. bfloat16 gives the small healthy
            mismatch that real systems have (1e-3 nats; TRL, verl and slime all send bfloat16).
        tasks: size of the prompt pool, drawn from the `rl` split with `task_seed`.
        threads: torch threads of the run; traces are bit-identical only for equal thread counts.
        environment: `arithmetic` (one turn), `calculator`: half of the prompts of a step are two-turn tool tasks, or
            `file`: one's own prompts.
        task_file: JSON lines `{"prompt": ..., "answer": ...}` for `file`; a response is right when its last number is
            that of the answer.
        device: `cpu` or `cuda`, of both engines.
        dtype: in which the trainer holds its weights.
        engine: `lab`, the lab's own rollout engine, or `vllm`, TRL's vLLM beside the trainer on a GPU. Faults of the
            rollout engine can only act in the lab's own.
    """

    steps: int = 60
    prompts: int = 16
    samples: int = 8
    learning_rate: float = 3e-4
    beta: float = 0.02
    temperature: float = 1.0
    max_new_tokens: int = 6
    rollout_dtype: str = "float32"
    sync_dtype: str = "bfloat16"
    tasks: int = 4000
    task_seed: int = 1234
    threads: int = 1
    environment: str = "arithmetic"
    task_file: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    engine: str = "lab"

    def __post_init__(self) -> None:
        for name in _WHOLE:
            _check_number(name, getattr(self, name), whole=True)
        for name in ("learning_rate", "beta", "temperature"):
            _check_number(name, getattr(self, name))
        for name in ("steps", "prompts", "max_new_tokens", "tasks", "threads"):
            if getattr(self, name) < 1:
                raise LabError(f"{name} is {getattr(self, name)}", expected="at least 1")
        if self.samples < 2:
            raise LabError(f"samples is {self.samples}", expected="at least 2: GRPO compares within a group")
        if self.tasks < self.prompts:
            raise LabError(
                f"a pool of {self.tasks} tasks cannot fill a step of {self.prompts} prompts",
                remedy="raise tasks or lower prompts",
            )
        if not self.temperature > 0 or not self.learning_rate >= 0:
            raise LabError("temperature must be positive and the learning rate not negative")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise LabError(f"{name} is {getattr(self, name)!r}", expected=f"one of {', '.join(choices)}")
        if self.environment == "calculator" and self.prompts % 2:
            raise LabError(f"prompts is {self.prompts}", expected="an even number: half of them are tool tasks")
        if (self.environment == "file") != bool(self.task_file):
            raise LabError("environment 'file' and task_file go together", remedy="give both or neither")
        if self.engine == "vllm" and (self.device == "cpu" or self.environment == "calculator"):
            raise LabError("vLLM needs a GPU and tasks of one turn", remedy="use engine='lab'")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; fields that came later are left out at their defaults."""
        return {name: value for name, value in asdict(self).items() if _ADDED_LATER.get(name) != value}


@dataclass(frozen=True)
class Injection:
    """One fault to inject.

    Args:
        fault: id in the catalogue.
        strength: in [0, 1]; 0 is healthy, bit for bit.
        onset: first step (from 1) at which the fault acts.

    Raises:
        LabError: strength is no number or onset no whole one; `check_injection` says whether they fit a run.
    """

    fault: str
    strength: float = 1.0
    onset: int = 20

    def __post_init__(self) -> None:
        _check_number("strength", self.strength, finite=False)  # its range is the catalogue's business
        _check_number("onset", self.onset, whole=True)


@dataclass(frozen=True)
class Application:
    """One remedy to apply.

    Args:
        remedy: id in the catalogue of remedies.
        start: first step (from 1) from which it acts.
    """

    remedy: str
    start: int = 1


@dataclass(frozen=True)
class Snapshots:
    """Where the state of runs between two steps is kept (`moeproxy.lab.snapshot`).

    A run starts from the newest snapshot in the folder that it would pass through itself. That saves time and changes
    nothing in its trace, so it is no part of what the run is.

    Args:
        folder: of the files.
        steps: after which of its steps the run leaves a snapshot there.
    """

    folder: Path
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunSpec:
    """One run: which model, with which fault, seed and settings.

    Args:
        model: directory of the checkpoint.
        label, method, n_experts: how the trace names the model (see `moeproxy.traces.RunInfo`).
        seed: decides prompt order and sampling; runs of equal seed are pairs.
        injection: the fault, or None for a healthy run.
        settings: of the loop.
        further: faults that act beside `injection`; two on one seam act one after the other, in this order.
        remedies: what is done against them; each acts around the faults, in this order.
        snapshots: where to start from, and what to leave for others; None starts from the checkpoint.
    """

    model: Path
    label: str = "original"
    method: str = "original"
    n_experts: int = 0
    seed: int = 0
    injection: Injection | None = None
    settings: GRPOSettings = field(default_factory=GRPOSettings)
    further: tuple[Injection, ...] = ()
    remedies: tuple[Application, ...] = ()
    snapshots: Snapshots | None = None

    def __post_init__(self) -> None:
        if self.further and self.injection is None:
            raise LabError("further faults without a first one", remedy="give the first of them as `injection`")

    @property
    def injections(self) -> tuple[Injection, ...]:
        """All faults of the run, in the order in which they are injected; none for a healthy run."""
        return (self.injection, *self.further) if self.injection else ()

    @property
    def fault_name(self) -> str:
        """The faults with strength and onset, and the remedies, as a part of a file name; without a fault "healthy"."""
        faults = _short([f"{item.fault}-{item.strength:g}-at{item.onset}" for item in self.injections]) or "healthy"
        remedies = _short([f"{item.remedy}-from{item.start}" for item in self.remedies])
        return f"{faults}~{remedies}" if remedies else faults

    def key(self, fingerprint: str) -> str:
        """Return the content key of the run: equal for runs that must give equal traces."""
        content = {**self.to_dict(), "model": fingerprint}
        content.pop("snapshots", None)  # a run is the same wherever it starts
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        stored = {**asdict(self), "model": str(self.model), "settings": self.settings.to_dict()}
        for name in ("further", "remedies", "snapshots"):
            if not stored[name]:
                del stored[name]  # so that runs without them keep the content keys they were recorded under
        if self.snapshots:
            stored["snapshots"]["folder"] = str(self.snapshots.folder)
        return stored

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> RunSpec:
        """Return the spec that `to_dict` wrote."""
        injection, snapshots = stored["injection"], stored.get("snapshots")
        return cls(
            **{name: stored[name] for name in ("label", "method", "n_experts", "seed")},
            model=Path(stored["model"]),
            injection=Injection(**injection) if injection else None,
            settings=GRPOSettings(**stored["settings"]),
            further=tuple(Injection(**item) for item in stored.get("further", ())),
            remedies=tuple(Application(**item) for item in stored.get("remedies", ())),
            snapshots=Snapshots(Path(snapshots["folder"]), tuple(snapshots["steps"])) if snapshots else None,
        )


def _short(names: list[str]) -> str:
    # A file name has room for 255 bytes; what decides a run is in its content key anyway.
    return "+".join(names if len(names) <= 3 else [*names[:2], f"{len(names) - 2}-more"])
