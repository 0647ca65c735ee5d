"""`verify` names the step and the tensor that a planted difference touches first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moeproxy import recovery
from moeproxy.errors import LabError, RecoveryError
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, RunSpec, Snapshots
from moeproxy.lab.snapshot import Snapshot
from moeproxy.places import data_dir
from moeproxy.recovery.digests import DigestLog, digest, digests, leaves, read_digests
from moeproxy.recovery.parting import Parting

STEPS = (1, 2, 3, 4)


def _state(shift: float = 0.0) -> dict[str, Any]:
    weights = {"first": torch.arange(6.0).reshape(2, 3), "second": torch.tensor([1.0, float("nan"), 3.0 + shift])}
    optimizer = {"state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    return {"weights": weights, "optimizer": optimizer, "random": {"torch": torch.arange(3, dtype=torch.uint8)}}


def _snapshots(folder: Path, changes: dict[int, dict[str, Any]] | None = None) -> Path:
    for step in STEPS:
        state = _state() | (changes or {}).get(step, {})
        Snapshot(step, "run", rollout={}, record={}, **state).save(folder / f"run-after{step:05d}.pt")
    return folder


def _log(folder: Path, rows: list[tuple[int, dict[str, Any]]]) -> Path:
    log = DigestLog(folder / "digests.jsonl")
    for step, state in rows:
        log.add(step, digests(state))
    return folder


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.zeros(2), torch.zeros(2), True),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.zeros(1), -torch.zeros(1), False),  # equal as numbers, not as bits
        (torch.zeros(2), torch.zeros(1, 2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), False),
        (torch.zeros(1, dtype=torch.int32), torch.zeros(1), False),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous(), True),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_digests_are_equal_for_equal_bits_only(one: Any, other: Any, equal: bool) -> None:
    assert (digest(one) == digest(other)) == equal


def test_a_state_is_named_leaf_by_leaf_causes_first() -> None:
    names = list(digests(_state()))
    assert names[0] == "random/torch"
    assert names[-2:] == ["weights/first", "weights/second"]
    assert "optimizer/state/0/exp_avg" in names
    assert dict(leaves({"a": [1, 2], "b": [torch.ones(1)]})).keys() == {"a", "b/0"}


def test_equal_runs_are_equal_however_they_were_kept(tmp_path: Path) -> None:
    kept = _snapshots(tmp_path / "a")
    logged = _log(tmp_path / "b", [(step, _state()) for step in STEPS])
    for other in (logged, logged / "digests.jsonl", _snapshots(tmp_path / "c")):
        found = recovery.verify(kept, other)
        assert (found.equal, found.step, found.tensor, found.steps, found.last_equal) == (True, None, None, 4, 4)
        assert "all 4 steps" in repr(found)


def test_the_first_step_and_tensor_and_the_size_are_named(tmp_path: Path) -> None:
    later = _state(shift=0.5)["weights"]
    found = recovery.verify(
        _snapshots(tmp_path / "a"), _snapshots(tmp_path / "b", {3: {"weights": later}, 4: {"weights": later}})
    )
    assert (found.step, found.last_equal, found.tensor) == (3, 2, "weights/second")
    (difference,) = found.differences
    assert (difference.largest, difference.changed) == (0.5, 1)  # the NaN that both have is no difference
    assert found.tensors == 6
    assert Parting.load(found.save(tmp_path / "found.json")) == found
    assert "after step 3" in found._repr_html_()


def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    changed = _state(shift=1.0)
    changed["random"] = {"torch": torch.zeros(3, dtype=torch.uint8)}
    found = recovery.verify(_snapshots(tmp_path / "a"), _snapshots(tmp_path / "b", {2: changed}))
    assert (found.step, found.tensor) == (2, "random/torch")
    assert [item.name for item in found.differences] == ["random/torch", "weights/second"]


def test_a_step_done_again_must_come_out_the_same(tmp_path: Path) -> None:
    whole = _log(tmp_path / "a", [(step, _state()) for step in STEPS])
    same = _log(tmp_path / "b", [(step, _state()) for step in (1, 2, 3, 2, 3, 4)])
    found = recovery.verify(whole, same)
    assert found.equal
    assert found.repeats == (2, 3)
    other = _log(tmp_path / "c", [(1, _state()), (2, _state()), (2, _state(shift=0.1)), (3, _state())])
    assert recovery.verify(whole, other).step == 2
    assert recovery.verify(other, whole).step == 2


def test_a_tensor_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    state = _state()
    del state["weights"]["first"]
    found = recovery.verify(_log(tmp_path / "a", [(1, _state())]), _log(tmp_path / "b", [(1, state)]))
    assert (found.tensor, found.differences[0].missing) == ("weights/first", "b")
    assert "only in the first run" in repr(found)


@pytest.mark.parametrize("written", [b"", b"nonsense"])
def test_a_damaged_snapshot_is_named(written: bytes, tmp_path: Path) -> None:
    kept, hurt = _snapshots(tmp_path / "a"), _snapshots(tmp_path / "b")
    (hurt / "run-after00002.pt").write_bytes(written)
    with pytest.raises(LabError, match=r"b/run-after00002\.pt: no readable snapshot"):
        recovery.verify(kept, hurt)


@pytest.mark.parametrize("keep", [_log, None])
def test_a_run_that_was_cut_off_is_not_equal_and_says_where_it_ends(keep: Any, tmp_path: Path) -> None:
    whole = _log(tmp_path / "a", [(step, _state()) for step in range(1, 8)])
    short = keep(tmp_path / "b", [(step, _state()) for step in STEPS]) if keep else _snapshots(tmp_path / "b")
    for one, other, side, words in ((whole, short, "b", "second"), (short, whole, "a", "first")):
        found = recovery.verify(one, other)
        assert (found.equal, found.shorter, found.step, found.steps, found.last_equal) == (False, side, None, 4, 4)
        assert f"the {words} run ends with step 4" in repr(found)
        assert "goes on to step 7: nothing can be compared from step 5 on" in repr(found)
        assert Parting.load(found.save(tmp_path / "found.json")) == found
    path = short / "digests.jsonl"
    if keep:
        path.write_bytes(path.read_bytes()[:-5])  # torn
        assert "nothing can be compared from step 4 on" in repr(recovery.verify(whole, short))
    assert recovery.verify(short, short).equal
    assert recovery.verify(short, short).shorter == ""


def _ranks(folder: Path, steps: int, ranks_of_last: tuple[int, ...], lacking_in: int = 0) -> Path:
    log = DigestLog(folder / "digests.jsonl")
    for step in range(1, steps + 1):
        for rank in ranks_of_last if step == steps else (0, 1):
            if (step, rank) != (lacking_in, 1):
                log.add(step, {f"weights/shard-{rank}": f"{step}"})
    return folder


def test_a_last_step_that_one_rank_did_not_come_to_log_is_no_parting(tmp_path: Path) -> None:
    whole, cut = _ranks(tmp_path / "a", 9, (0, 1)), _ranks(tmp_path / "b", 8, (0,))
    found = recovery.verify(whole, cut)
    assert (found.step, found.equal, found.shorter, found.steps, found.ends) == (None, False, "b", 7, (9, 7))
    assert recovery.verify(cut, whole).ends == (7, 9)
    lacks = _ranks(tmp_path / "c", 9, (0, 1), lacking_in=5)  # and went on: that is a difference
    found = recovery.verify(whole, lacks)
    assert (found.step, found.tensor, found.differences[0].missing) == (5, "weights/shard-1", "b")


def test_a_torn_last_line_is_left_out_and_other_files_are_refused(tmp_path: Path) -> None:
    path = _log(tmp_path, [(1, _state()), (2, _state())]) / "digests.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_digests(path)) == [1]
    DigestLog(path).add(3, digests(_state()))  # a replacement writes on after the torn line
    assert list(read_digests(path)) == [1, 3]
    path.write_text('{"step": 1}\n')
    with pytest.raises(RecoveryError, match=r"no log of digests.*moeproxy\.digests"):
        read_digests(path)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    kept = _snapshots(tmp_path / "a")
    with pytest.raises(RecoveryError, match="nothing to compare"):
        recovery.verify(tmp_path / "empty", kept)
    with pytest.raises(RecoveryError, match=r"no step in common.*1 to 4.*9 to 9"):
        recovery.verify(kept, _log(tmp_path / "b", [(9, _state())]))
    Snapshot(1, "other", rollout={}, record={}, **_state()).save(kept / "other-after00001.pt")
    with pytest.raises(RecoveryError, match="snapshots of 2 runs"):
        recovery.verify(kept, kept)
    with pytest.raises(RecoveryError, match="no saved comparison"):
        Parting.load(tmp_path / "b" / "digests.jsonl")


def test_two_real_runs_part_where_their_settings_do(tmp_path: Path) -> None:
    """With another learning rate the gradients of step 1 are the same, what is made of them is not."""
    settings = GRPOSettings(steps=2, prompts=2, samples=2, tasks=16)
    spec = RunSpec(data_dir() / "models" / "qwen3-moe-tiny", seed=5, settings=settings)
    for name, rate in (("a", 3e-4), ("b", 3e-4), ("c", 1e-4)):
        here = Snapshots(tmp_path / name, (1, 2))
        run(replace(spec, settings=replace(settings, learning_rate=rate), snapshots=here))
    assert recovery.verify(tmp_path / "a", tmp_path / "b").equal
    found = recovery.verify(tmp_path / "a", tmp_path / "c")
    names = [item.name for item in found.differences]
    assert (found.step, found.tensor) == (1, "optimizer/param_groups/0/lr")
    assert not any("exp_avg" in name or name.startswith("random") for name in names)
    assert any(name.startswith("weights/") for name in names)
