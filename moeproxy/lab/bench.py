"""The runs of the benchmark that data/bench ships: every fault, clear and subtle, on original, proxies and controls.

An un-injected run is healthy by construction, and an injected one carries its fault, strength and onset from the
settings that made it. `moeproxy.lab.bench_record` records them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moeproxy.experts.profile import profile
from moeproxy.lab.calculator import answer_call, right_call, sample_calculators
from moeproxy.lab.faults import FAULTS
from moeproxy.lab.identity import DENSE
from moeproxy.lab.pruning_study import calibration_texts
from moeproxy.lab.record import Choice, build_proxies
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec

STEPS = 60
ONSETS = range(10, 31)
SEEDS = (0, 1, 2)
CONTROL_SEEDS = (0, 1)
CALIBRATION = range(100, 140)
CONTROL_CALIBRATION = range(100, 112)
VARIED = range(200, 205)
SETTINGS = GRPOSettings(
    steps=STEPS, prompts=8, samples=8, learning_rate=1.5e-4, max_new_tokens=8, environment="calculator"
)
VARIATIONS = (
    replace(SETTINGS, learning_rate=7.5e-5),
    replace(SETTINGS, learning_rate=3e-4),
    replace(SETTINGS, temperature=0.8),
    replace(SETTINGS, temperature=1.2),
)
PROXIES = (Choice("cluster", 16), Choice("cluster", 8))
CONTROLS = tuple(Choice(method, 16) for method in ("random", "first", "frequency", "reap", "merge"))
LEVELS = ("clear", "subtle")
N_FIRST = 15  # healthy runs of a model that come before its faulty ones

SUBTLE = {
    "rollout_logp_precision": 0.75,
    "gradient_overflow": 0.4,
    "nan_poison": 0.1,
    "lm_head_precision": 0.75,
    "router_precision": 0.75,
    "stale_rollout": 0.5,
    "weight_conversion_wrong": 0.25,
    "position_shift": 0.25,
    "sampling_semantics": 0.4,
    "optimizer_state_lost": 0.1,
    "kl_sign": 0.5,
    "attention_tail": 0.75,
    "router_frozen": 0.5,
    "reward_hacking": 0.5,
    "update_freeze": 0.5,
    "delayed_credit": 0.5,
}
"""Strengths of the subtle level where it is not 0.3; the clear level is strength 1."""


def injection_of(fault: str, level: str, seed: int) -> Injection:
    """Return the injection of a benchmark run; its onset is drawn from fault, level and seed alone."""
    strength = 1.0 if level == "clear" else SUBTLE.get(fault, 0.3)
    onset = random.Random(f"{fault} {level} {seed}").choice(ONSETS)
    return Injection(fault, strength, onset)


@dataclass(frozen=True)
class Model:
    """One model of the benchmark.

    Args:
        path: of its checkpoint.
        label, method: how traces name it.
        control: whether it only serves as a control (clear level, fewer seeds).
    """

    path: Path
    label: str
    method: str
    control: bool = False

    def spec(self, seed: int, injection: Injection | None = None, settings: GRPOSettings = SETTINGS) -> RunSpec:
        """Return one run of this model."""
        return RunSpec(self.path, self.label, self.method, seed=seed, injection=injection, settings=settings)

    def healthy(self) -> list[RunSpec]:
        """Return the healthy runs: twins of the faulty ones, calibration seeds, and other settings."""
        seeds = (*CONTROL_SEEDS, *CONTROL_CALIBRATION) if self.control else (*SEEDS, *CALIBRATION)
        varied = [] if self.control else [(seed, settings) for settings in VARIATIONS for seed in VARIED]
        return [self.spec(seed) for seed in seeds] + [self.spec(seed, settings=chosen) for seed, chosen in varied]

    def faulty(self, level: str) -> list[RunSpec]:
        """Return the runs with every fault at one level; a dense model has no experts that could break."""
        seeds = CONTROL_SEEDS if self.control else SEEDS
        ids = [item.id for item in FAULTS.values() if not (item.needs_experts and self.method == DENSE)]
        return [self.spec(seed, injection_of(fault, level, seed)) for seed in seeds for fault in ids]


def dialogues(n: int = 400) -> list[str]:
    """Return calibration texts of the benchmark: plain arithmetic, and calculator dialogues as they should go."""
    tools = [
        task.prompt + right_call(task) + answer_call(right_call(task)).text + task.answer
        for task in sample_calculators(n, seed=1000, split="calibration")
    ]
    return calibration_texts(0, n) + tools


def models_of(models: Path, proxies: Path) -> list[Model]:
    """Return every model of the benchmark; proxies are built in `proxies` where they are missing."""
    source = models / "qwen3-moe-tools"
    statistics = profile(source, dialogues(), batch_size=200)
    built = build_proxies(source, statistics, (*PROXIES, *CONTROLS), proxies)
    chosen = [Model(path, c.label, c.method, control=c in CONTROLS) for c, path in built.items()]
    return [Model(source, "original", "original"), *chosen, Model(models / "dense-tools", DENSE, DENSE, control=True)]


def grid(models: Sequence[Model]) -> list[RunSpec]:
    """Return every run once, in the order in which they are of use: what a first verdict needs comes first.

    First clear faults with their healthy twins and a few calibration seeds, on the original, the larger proxy and the
    controls; then the subtle faults, the smaller proxy, and the other healthy runs.
    """
    main, controls = [m for m in models if not m.control], [m for m in models if m.control]
    first = [*main[:2], *controls]
    parts: list[Iterable[RunSpec]] = []
    for model in first:
        parts += [model.healthy()[:N_FIRST], model.faulty("clear")]
    for model in main:
        parts += [model.healthy()[:N_FIRST], model.faulty("clear"), model.faulty("subtle")]
    parts += [model.healthy() for model in models]
    return list(dict.fromkeys(spec for part in parts for spec in part))
