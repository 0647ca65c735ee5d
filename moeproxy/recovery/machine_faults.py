"""Catalogue of machine faults: what fails, how it is made here, how it shows, and what recovery does.

They are no entries of `moeproxy.lab.faults`: those change what is trained, these must change nothing that is trained.
`python -m moeproxy.recovery.machine_faults` rewrites MACHINES.md beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file
from moeproxy.recovery.detection import PATIENCE
from moeproxy.recovery.plan import Mishap

PAGE = Path(__file__).with_name("MACHINES.md")
_ROBUST = "arXiv 2512.22492 (RobustRL)"
_LLAMA = "arXiv 2407.21783, section 3.3.4 (interruptions of Llama 3's training)"


@dataclass(frozen=True)
class MachineFault:
    """One entry.

    Args:
        id: name used everywhere.
        title: a few words for people.
        what: what exactly happens here.
        made: how it is made, in step 1; None when it lies between two members, where a proxy makes it.
        shows: how it shows in events and in a log.
        twin: the public report or paper that it stands for.
        check: what tells it from a training fault, or from its neighbours.
        remedy: what recovery does.
    """

    id: str
    title: str
    what: str
    made: Mishap | None
    shows: str
    twin: str
    check: str
    remedy: str

    def mishap(self, step: int, member: str = "") -> Mishap:
        """Return the mishap that makes this fault in a job.

        Args:
            step: of the trainer.
            member: another one of the same role.

        Raises:
            RecoveryError: it is none of a member: it lies between two.
        """
        if self.made is None:
            raise RecoveryError(f"{self.id} is no fault of a member", expected="a proxy between two of them")
        return replace(self.made, step=step, member=member or self.made.member)


MACHINE_FAULTS: dict[str, MachineFault] = {
    item.id: item
    for item in (
        MachineFault(
            id="trainer_killed",
            title="Trainer killed",
            what="SIGKILL to the trainer's process in the middle of an update.",
            made=Mishap("trainer", 1, "update"),
            shows="One step takes as long as a restart; with disk checkpoints only, the log goes back some steps.",
            twin=f"{_ROBUST}; {_LLAMA}",
            check="Steps done again give the same numbers, and no signal jumps at the restart.",
            remedy="A standby goes on from the state in a rollout's memory; rollouts keep generating.",
        ),
        MachineFault(
            id="rollout_killed",
            title="Rollout killed",
            what="SIGKILL to one rollout's process while it generates.",
            made=Mishap("rollout-0", 1, "generate"),
            shows="Steps take longer while fewer rollouts share the prompts; no signal moves.",
            twin=_ROBUST,
            check="Throughput drops by the share of the rollouts that are gone.",
            remedy="The others take over its share; a replacement gets its weights from one of them.",
        ),
        MachineFault(
            id="hung_collective",
            title="Hung collective",
            what="The update never returns, as a collective does whose peer is gone; the process lives and answers.",
            made=Mishap("trainer", 1, "update", "hang"),
            shows="No step ends; processes are alive, and a plain heartbeat says that all is well.",
            twin=f"{_LLAMA}; arXiv 2410.21680 (Meta)",
            check="The trainer is in its own phase and makes no progress; one that waits for others is idle by right.",
            remedy=(
                "Judged failed after `trainer_hang` seconds in its own phase, killed, and replaced. "
                "A rollout: after `rollout_hang` seconds if it gives no heartbeat, "
                f"after {PATIENCE:.0f} times as long if it does."
            ),
        ),
        MachineFault(
            id="slow_rank",
            title="Slow machine (straggler)",
            what="One rollout takes 0.3 s longer for each share, from a step on.",
            made=Mishap("rollout-1", 1, "generate", "slow", seconds=0.3),
            shows="Steps take longer from some step to the end; no other signal moves.",
            twin="arXiv 2410.12588 (FALCON, fail-slow)",
            check="The clock alone moves: response lengths stay the same.",
            remedy="It answers its heartbeat and is no failed one; others take the shares that it does not.",
        ),
        MachineFault(
            id="network_drop",
            title="Network drop between roles",
            what="The connection that carries weights breaks off after some bytes, or goes dumb.",
            made=None,
            shows="A rollout stays in the phase `weights`; its neighbours have the version that it lacks.",
            twin=f"{_ROBUST} (reconnect)",
            check="The bytes that came are fewer than were said, or their checksum is wrong.",
            remedy="The next member that has the weights is asked; damaged bytes are never used.",
        ),
        MachineFault(
            id="rank_drop",
            title="Network drop between ranks",
            what="The connections of one rank to the others break within a step, or lose what is sent (`mute`).",
            made=Mishap("trainer-1", 1, "update", "drop"),
            shows="No rank dies; all begin the step once more, without a gap in the numbers.",
            twin="arXiv 2607.01646 (PHOENIX: communicators are rebuilt); arXiv 2410.21680 (Meta: InfiniBand links)",
            check="Every process is the one that it was: no start of another, no shard that moved.",
            remedy="Broken connections are noticed at once, dumb ones after `timeout`; all connect anew.",
        ),
        MachineFault(
            id="disk_full",
            title="Disk full at a checkpoint",
            what="The operating system refuses to write the checkpoint (a limit on the size of files stands for it).",
            made=Mishap("trainer", 1, "publish", "disk_full"),
            shows="An event `checkpoint` with its problem; training goes on.",
            twin="arXiv 2410.21680 (Meta: failures of storage)",
            check="Only the age of the newest checkpoint grows.",
            remedy="The older checkpoint stays whole; the state lies in rollouts' memory meanwhile.",
        ),
        MachineFault(
            id="corrupted_checkpoint",
            title="Corrupted checkpoint",
            what="One byte of the newest checkpoint is turned over on disk.",
            made=Mishap("trainer", 1, "publish", "corrupt"),
            shows="Nothing, until a restart needs it.",
            twin="arXiv 2407.21783 (silent data corruption)",
            check="Its checksum is wrong.",
            remedy=(
                "The older one is used; the damaged one is named, and stays only until its step, done again, writes a "
                "new one in its place or it is pruned as one of the older ones."
            ),
        ),
    )
}


def machine_fault(fault_id: str) -> MachineFault:
    """Return the machine fault with this id.

    Raises:
        RecoveryError: no such fault; the known ids are listed.
    """
    if fault_id not in MACHINE_FAULTS:
        raise RecoveryError(f"unknown machine fault {fault_id!r}", expected=f"one of {', '.join(MACHINE_FAULTS)}")
    return MACHINE_FAULTS[fault_id]


_REACHED = """## Who can reach a job

Nobody but this machine: every process of a job, on Ray, torchft and nvidia-resiliency-ext, waits for connections on
127.0.0.1 only. Tests list their sockets while jobs run (`tests/recovery/test_roles.py`, `test_hotswap*.py`).

- Ray 2.60 is told that its node is 127.0.0.1 (`moeproxy/lab/ray_start.py`); gloo takes the interface `lo` by its
  variable `GLOO_SOCKET_IFNAME`.
- Torch's `TCPStore` listens on all interfaces, unless it is handed a socket: here it is (`loopback.py`).
- torchft 0.2.0: the lighthouse takes an address. The manager always asks for `[::]` and the checkpoint server for
  every address; no argument and no variable changes that, so `loopback.py` gives both another one while they are made.
  This holds for that very version, which `pyproject.toml` asks for; with another the test says so.
- Users of this machine can still reach a job: neither torchft, gloo nor torch's store asks who they are.
"""

_COST = """## What a snapshot costs

Measured with `python -m moeproxy.recovery.snapshot_cost` (two ranks, shards of 11.6 MB each, no fault; a step with a
snapshot beside it against the two around it without; median of the ratios, 95 % interval of a bootstrap over blocks):

| batch | jobs | steps compared | median step without | cost of a snapshot |
| --- | --- | --- | --- | --- |
| 16 | 5 | 140 | 0.11 s | +6.7 % (+2.9 to +10.8) |
| 192 | 10 | 280 | 0.42 s | +1.6 % (+0.6 to +2.4) |

- The goal of less than 3 % of a step holds for steps of 0.42 s and not for those of 0.11 s. A step of GRPO on the
  testbed takes 0.42 s (cluster-16) to 0.56 s (original), the medians of data/bench. The bytes a second are those of a
  large job: 11.6 MB in 0.42 s are 28 MB/s a rank, and 30 B parameters with their moments (12 bytes each) on 64 ranks
  are 56 MB/s in steps of 100 s.
- AMD EPYC, 2 cores, 2 ranks, nothing else running: no core is free for the copy, so all of it is taken from training.
  The copy is 3 ms of processor time on each rank, the push over TCP on this machine 5 ms; both depend on the size of a
  shard and not on the step.
- The threads of copy and push have a lower priority (`priority.py`, niceness 10) and mostly run where a rank waits
  for another. With the lowest (19) the push starved beside other programs, and a job with a dropped network failed;
  with equal priority a snapshot cost +6.5 to +10.1 % of 0.10 s (four measurements of 112 steps) where niceness 10 cost
  +3.5 % (+0.2 to +7.6).
- Training never waits for the copy: a step is said to be done once it is whole, at the latest with the push. Taken by
  training itself, it cost +8.6 % of 0.10 s (+6.5 to +10.6, 168 steps); waited for after the next forward pass, +3.6 %
  of 0.48 s (+2.2 to +4.5, 252 steps). For the push a step was held up for 9 µs (median; 0.1 ms at most).
"""


_PAPER = """## When the paper's figures come out of the calculator

RobustRL (arXiv 2512.22492) has over 80 % against 60 % at one trainer fault in ten steps, and names no restart times.
With the defaults of `Cluster(step=300)` it is 83 % against 20 %: a checkpoint is written in every tenth step only, and
what a restart of everything does again cannot be made up for. The figures come out with

- `trainers=16, rollouts=16, checkpoint_every=1`, and 0 for `detect`, `reconnect`, `checkpoint` and `restart_rollout`;
- faults of trainers alone: `rollouts=0` for the restart of everything;
- `restart_task=1381` for the 60 %, and `restart_trainer` from 808 to 1118 for the 8.4 to 17.4 % of wall clock that the
  paper saves, all in seconds at a step of 300. Roles then reach 83 to 86 %.
"""


def page() -> str:
    """Return the catalogue as Markdown."""
    head = "# Machine faults\n\nGenerated from `machine_faults.py`; do not edit. They change nothing that is trained.\n"
    return "\n".join([head, *map(_entry, MACHINE_FAULTS.values()), _REACHED, _COST, _PAPER])


def _entry(item: MachineFault) -> str:
    rows = {
        "What happens": item.what,
        "How it shows": item.shows,
        "Stands for": item.twin,
        "Discriminating check": item.check,
        "Recovery": item.remedy,
    }
    lines = "\n".join(f"- {name}: {text}" for name, text in rows.items())
    return f"## `{item.id}`: {item.title}\n\n{lines}\n"


if __name__ == "__main__":
    with atomic_file(PAGE) as written:
        written.write_text(page(), "utf-8")
