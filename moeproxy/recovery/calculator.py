"""Expected effective training time of a cluster, from what one fault costs and how often there is one.

Faults come at random, independently (Poisson). The time to get through a stretch of work that has to be done in one go,
with a fixed cost after each fault that may itself be hit, is Daly's (FGCS 22, 2006, eq. 13; the same model is behind
Meta's account of ETTR, arXiv 2410.21680).

| strategy | after a fault |
|---|---|
| none | the job starts from its first step again |
| task | every role restarts from the last checkpoint on disk (as in ByteRobust) |
| role | the failed role only restarts; the trainer's state of the last step lies in a rollout's memory (RobustRL) |

RobustRL's figures at one trainer fault in ten steps, over 80 % for `role` and 60 % for `task`, do not come out of the
defaults (0.83 and 0.20 with `Cluster(step=300).at_faults_per_step(0.1)`). The paper names no restart times. These give
them: 16 trainers and 16 rollouts whose faults cost nothing, a checkpoint in every step, and no time to detect, to
reconnect and to save; 60 % then needs `restart_task` 1381, and the 8.4 to 17.4 % of wall clock it saves need
`restart_trainer` 1118 to 808, which is 0.83 to 0.86. With one in every tenth step no restart time gives 60 %.

    free = dict(detect=0, reconnect=0, checkpoint=0, checkpoint_every=1, restart_rollout=0)
    paper = Cluster(300, 16, 16, restart_task=1381, restart_trainer=1118, **free).at_faults_per_step(0.1)
    expected(replace(paper, rollouts=0), "task").ratio, expected(paper, "role").ratio    # 0.60, 0.83

`rollouts=0` leaves their faults out: a restart of everything answers them as well, and the figure is for trainers'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from html import escape

import numpy as np
from scipy.optimize import brentq

from moeproxy.errors import RecoveryError
from moeproxy.recovery.effective import Ettr
from moeproxy.recovery.events import ROLLOUT, TRAINER
from moeproxy.recovery.inputs import positive

NONE, TASK, ROLE = "none", "task", "role"
STRATEGIES: Mapping[str, str] = {
    NONE: "start again from the first step",
    TASK: "restart everything from the checkpoint",
    ROLE: "restart the failed role",
}


@dataclass(frozen=True)
class Cluster:
    """A job on a cluster and what its faults cost, all times in seconds.

    Args:
        step: one training step without faults.
        trainers, rollouts: machines of each role.
        mtbf: mean time between failures of one machine.
        detect: from a fault to its detection.
        restart_task: until every role works again, on disk state (scheduling, processes, weights, warm-up).
        restart_trainer, restart_rollout: the same for one role; with a warm standby seconds.
        reconnect: until a restarted role has its weights and peers.
        checkpoint_every: steps between checkpoints on disk.
        checkpoint: what one holds the trainer up.
        steps: length of the job, for the strategy `none`.
    """

    step: float
    trainers: int = 1
    rollouts: int = 1
    mtbf: float = 50 * 24 * 3600.0
    detect: float = 60.0
    restart_task: float = 600.0
    restart_trainer: float = 60.0
    restart_rollout: float = 300.0
    reconnect: float = 10.0
    checkpoint_every: int = 10
    checkpoint: float = 5.0
    steps: int = 500

    def __post_init__(self) -> None:
        for item in fields(self):
            value, zero = getattr(self, item.name), item.name in _MAY_BE_ZERO
            if isinstance(value, np.generic):
                object.__setattr__(self, item.name, value := value.item())
            positive(item.name, value, zero=zero)
            if item.name in _COUNTS and (value != int(value) or value > _MOST):
                raise RecoveryError(f"{item.name} is {value!r}", expected=f"a whole number, at most {_MOST:.0e}")

    @property
    def trainer_faults_per_step(self) -> float:
        """Expected faults of trainer machines in one step's time."""
        return self.trainers * self.step / self.mtbf

    def at_faults_per_step(self, trainer_faults: float) -> Cluster:
        """Return the cluster with the mean time between failures that gives so many trainer faults a step.

        Raises:
            RecoveryError: it is no number above 0, or so far from 1 that no mean time gives it.
        """
        positive("trainer_faults", trainer_faults)
        mtbf = self.trainers * self.step / trainer_faults
        if not 0 < mtbf < math.inf:
            raise RecoveryError(f"trainer_faults is {trainer_faults!r}", expected="a number that a machine can have")
        return replace(self, mtbf=mtbf)

    @staticmethod
    def measured(run: Ettr, **known: float) -> Cluster:
        """Return the cluster whose costs are the medians of what a run showed.

        Args:
            run: with at least one outage; of one of a manager, which reconnects to nobody and is none of the cluster's
                machines, only the detection counts.
            known: further fields, above all those that the run did not show.

        Raises:
            RecoveryError: the run showed no outage.
        """
        if not run.outages:
            raise RecoveryError("the run had no outage", remedy="give the costs of a fault yourself, or kill a role")
        costs = {"step": run.productive / run.steps, "detect": _median([o.detect - o.fault for o in run.outages])}
        away = [o for o in run.outages if o.whole_task or o.role in (TRAINER, ROLLOUT)]
        for name, chosen in (
            ("restart_task", [o for o in away if o.whole_task]),
            ("restart_trainer", [o for o in away if o.role == TRAINER and not o.whole_task]),
            ("restart_rollout", [o for o in away if o.role == ROLLOUT and not o.whole_task]),
        ):
            if chosen:
                costs[name] = _median([o.ready - o.detect for o in chosen])
        if away:
            costs["reconnect"] = _median([o.end - o.ready for o in away])
        return Cluster(**(costs | known))  # pyright: ignore[reportArgumentType] - counts come through `known`


_COSTS = ("detect", "restart_task", "restart_trainer", "restart_rollout", "reconnect", "checkpoint")
_COUNTS = ("trainers", "rollouts", "checkpoint_every", "steps")
_MAY_BE_ZERO = {"rollouts", *_COSTS}
_MOST = 1e12


@dataclass(frozen=True)
class Expected:
    """What to expect of a job under one strategy.

    Args:
        strategy: a key of `STRATEGIES`.
        ratio: effective training time ratio.
        strict: the same without credit for rollouts that work on while a trainer is away.
        wall: seconds of wall clock for one step that is kept.
        lost: of them, seconds that each cause takes.
    """

    strategy: str
    ratio: float
    strict: float
    wall: float
    lost: dict[str, float]

    def __repr__(self) -> str:
        lost = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.lost.items() if seconds > 0)
        return f"Expected({STRATEGIES[self.strategy]}: {self.ratio:.3f}, {self.wall:.3g} s a step; lost: {lost or 0} s)"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[9:-1])}</p>"


def expected(cluster: Cluster, strategy: str = ROLE) -> Expected:
    """Return the expected effective training time of a job.

    Args:
        cluster: the job and the costs of its faults.
        strategy: what is done after a fault, a key of `STRATEGIES`.

    Raises:
        RecoveryError: no such strategy.

    Example:
        >>> expected(Cluster(step=300, trainers=16, rollouts=16), "role").ratio
    """
    if strategy not in STRATEGIES:
        raise RecoveryError(f"no strategy {strategy!r}", expected=f"one of {', '.join(STRATEGIES)}")
    if strategy == ROLE:
        return _role(cluster)
    rate = (cluster.trainers + cluster.rollouts) / cluster.mtbf
    n = cluster.steps if strategy == NONE else cluster.checkpoint_every
    saving = 0.0 if strategy == NONE else cluster.checkpoint
    cost = cluster.detect + cluster.restart_task + cluster.reconnect
    wall = stretch(n * cluster.step + saving, rate, cost) / n
    lost = _shares(wall - cluster.step - saving / n, rate * wall, cluster, cluster.restart_task)
    ratio = cluster.step / wall
    return Expected(strategy, ratio, ratio, wall, lost | {"checkpoint": saving / n})


def _role(cluster: Cluster) -> Expected:
    """A trainer fault costs its restart and the step under way; a rollout fault only what that rollout would have made.

    Rollouts make all of a step's work, so one of R away for x seconds costs x / R: the others share its part.
    """
    rate = cluster.trainers / cluster.mtbf
    saving = cluster.checkpoint / cluster.checkpoint_every
    cost = cluster.detect + cluster.restart_trainer + cluster.reconnect
    wall = stretch(cluster.step + saving, rate, cost)
    lost = _shares(wall - cluster.step - saving, rate * wall, cluster, cluster.restart_trainer)
    credit = cluster.rollouts / (cluster.rollouts + cluster.trainers)
    away = sum(lost[name] for name in ("detect", "restart", "reconnect"))
    slowed = _product(wall / cluster.mtbf, cluster.detect + cluster.restart_rollout + cluster.reconnect)
    lost |= {"checkpoint": saving, "fewer rollouts": slowed if cluster.rollouts else 0.0}
    wall += lost["fewer rollouts"]
    if not math.isfinite(wall):
        return Expected(ROLE, 0.0, 0.0, math.inf, lost)
    return Expected(ROLE, (cluster.step + credit * away) / wall, cluster.step / wall, wall, lost)


def stretch(work: float, rate: float, cost: float) -> float:
    """Return the expected seconds for `work` seconds in one go, with `rate` faults a second that cost `cost` each.

    Infinity is for work that no float can hold the time of.
    """
    if rate * (work + cost) < 1e-12:
        return work
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(np.exp(rate * cost) * np.expm1(rate * work) / rate)
    return math.inf if math.isnan(found) else max(work, found)


def _shares(lost: float, faults: float, cluster: Cluster, restart: float) -> dict[str, float]:
    """Share out what is lost in one step: `faults` of them cost their parts, the rest is work done again.

    Faults that hit a restart cut it short: where they are many, the parts would add up to more than is lost.
    """
    parts = {"detect": cluster.detect, "restart": restart, "reconnect": cluster.reconnect}
    if not math.isfinite(lost):
        return dict.fromkeys(parts, math.inf) | {"recompute": math.inf}
    lost = max(0.0, lost)  # a difference of two times that are nearly the same may be below
    found = {name: _product(faults, seconds) for name, seconds in parts.items()}
    if (total := sum(found.values())) > lost:
        largest = max(parts.values())  # parts may be so large that their sum is no float
        shares = {name: seconds / largest for name, seconds in parts.items()}
        found = {name: lost * share / sum(shares.values()) for name, share in shares.items()}
        total = lost
    return found | {"recompute": lost - total}


def _product(faults: float, seconds: float) -> float:
    """Return what faults cost; nothing where each costs nothing, however many they are."""
    return faults * seconds if seconds else 0.0


def solved(
    cluster: Cluster, name: str, strategy: str, *, ratio: float | None = None, wall: float | None = None
) -> Cluster:
    """Return the cluster with the cost `name` such that a strategy reaches a ratio, or a wall clock for a step.

    Args:
        cluster: with all other fields as they are.
        name: what a fault or a checkpoint costs in seconds, such as `restart_task`.
        strategy: a key of `STRATEGIES`.
        ratio, wall: one of them: the ETTR to reach, or the seconds for a step.

    Raises:
        RecoveryError: no such cost, or no value from 0 to 1000 steps' time does it.
    """
    if name not in _COSTS:
        raise RecoveryError(f"no cost {name!r}", expected=f"one of {', '.join(_COSTS)}")
    if (ratio is None) == (wall is None):
        raise RecoveryError("give either a ratio or a wall clock")
    positive("ratio or wall", wall if ratio is None else ratio)

    def miss(seconds: float) -> float:
        found = expected(replace(cluster, **{name: seconds}), strategy)
        return found.ratio - ratio if ratio is not None else (wall or 0.0) - found.wall

    low, high = miss(0.0), miss(1000 * cluster.step)
    if low * high > 0:
        raise RecoveryError(
            f"no {name} gives that", where=strategy, expected=f"between {expected(cluster, strategy)!r} and worse"
        )
    return replace(cluster, **{name: brentq(miss, 0.0, 1000 * cluster.step, xtol=1e-9)})


def _median(values: list[float]) -> float:
    return float(np.median(values))
