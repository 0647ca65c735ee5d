"""Prediction against measurement: real gloo runs of 2 and 4 processes, each rank emulated alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moeproxy.errors import ScaleError
from moeproxy.scale import Emulation, GRPOProgram, Recording, Routing, emulate, record, run_real

Measured = dict[tuple[int, int], list[tuple[Emulation, Routing]]]


@pytest.fixture(scope="module")
def measured(program: GRPOProgram) -> Measured:
    return {(world, ep): run_real(program, world, ep, repeats=3, timeout=240) for world, ep in ((2, 2), (4, 2), (2, 1))}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep", "rank"), [(2, 2, 0), (2, 2, 1), (4, 2, 0), (4, 2, 3), (2, 1, 1)])
def test_the_prediction_is_the_measurement(
    program: GRPOProgram, measured: Measured, world: int, ep: int, rank: int
) -> None:
    real, routing = measured[world, ep][rank]
    fake = emulate(program, world, ep, rank, routing if ep > 1 else None)
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-4), "same meter, in the real rank"
    assert fake.peak == real.peak, "category by category"
    assert (fake.peak_phase, fake.peak_module) == (real.peak_phase, real.peak_module)
    assert fake.traffic == real.traffic
    # What torch's allocator saw beyond it is gloo's own copy of a buffer, with which the prediction is the measurement.
    beyond = real.allocator_bytes[0] - fake.peak_bytes
    assert 0 <= beyond <= (real.scratch_bytes["gloo"] or 0)
    assert fake.whole_bytes == real.whole_bytes
    assert fake.whole_bytes["gloo"] == pytest.approx(real.allocator_bytes[0], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (2, 1)])
def test_tied_weights_are_predicted_too(program: GRPOProgram, world: int, ep: int) -> None:
    tied = replace(program, config={**program.config, "tie_word_embeddings": True})
    for rank, (real, routing) in enumerate(run_real(tied, world, ep, repeats=2, timeout=240)):
        fake = emulate(tied, world, ep, rank, routing if ep > 1 else None)
        assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-4)
        assert fake.peak == real.peak
        assert fake.traffic == real.traffic
        assert fake.whole_bytes["gloo"] == pytest.approx(real.allocator_bytes[0], rel=0.03)


@pytest.mark.slow
def test_routing_tells_the_ranks_apart(measured: Measured) -> None:
    peaks = [real.peak_bytes for real, _ in measured[4, 2]]
    assert len(set(peaks)) > 1, "random tokens load the ranks differently"
    sent, received = ([routing.exact[0][0][side] for _, routing in measured[2, 2]] for side in (0, 1))
    assert [list(column) for column in zip(*sent, strict=True)] == received, "what is sent arrives"


@pytest.mark.slow
def test_executing_and_pretending_take_the_same_bytes(program: GRPOProgram, measured: Measured) -> None:
    _, routing = measured[4, 2][1]
    fake, executed = (emulate(program, 4, 2, 1, routing, level, repeats=2) for level in ("fake", "exec"))
    assert fake.peak_bytes == executed.peak_bytes
    assert fake.peak == executed.peak
    assert (fake.timeline_PC == executed.timeline_PC).all()
    assert fake.traffic == executed.traffic
    assert executed.allocator_bytes[0] == pytest.approx(executed.peak_bytes, rel=0.01)
    assert len(executed.seconds) == 2
    assert fake.seconds == ()


@pytest.fixture(scope="module")
def recording(program: GRPOProgram, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(program, 4, 2, tmp_path_factory.mktemp("recorded") / "run", steps=3, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_recorded_rank_runs_again_alone_bit_for_bit(program: GRPOProgram, recording: Recording, rank: int) -> None:
    alone = emulate(program, 4, 2, rank, level="replay", recording=recording)
    assert alone.losses == recording.losses[rank]
    assert alone.weights == recording.weights[rank]
    assert alone.logprobs == recording.logprobs[rank]
    assert alone.differs == ()
    assert len(set(alone.logprobs)) == 3, "the weights moved"
    assert len(set(recording.weights)) == 4, "each rank has shards of its own"


@pytest.mark.slow
def test_a_damaged_recording_is_refused_or_told(program: GRPOProgram, recording: Recording, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(recording.path, damaged)
    file = damaged / recording.rank_file(0).name
    with safe_open(file, framework="pt") as stored:
        found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        metadata = stored.metadata()
    name = next(name for name, values in found.items() if values.dtype == torch.float32 and values.numel() > 100)
    found[name] += 1.0
    save_file(found, file, metadata=metadata)
    with pytest.raises(ScaleError, match="was changed since it was recorded"):
        emulate(program, 4, 2, 0, level="replay", recording=damaged)
    # A recording of an earlier version has no checksums: then the results tell.
    index = json.loads((damaged / "recording.json").read_text())
    del index["checksums"]
    (damaged / "recording.json").write_text(json.dumps(index))
    alone = emulate(program, 4, 2, 0, level="replay", recording=damaged)
    assert "weights" in alone.differs
    assert "differs from the recording" in repr(alone)


@pytest.mark.slow
def test_what_was_not_recorded_cannot_be_replayed(program: GRPOProgram, recording: Recording, tmp_path: Path) -> None:
    other = replace(program, sequences=1)
    with pytest.raises(ScaleError, match="the recording's own program"):
        emulate(other, 4, 2, 0, level="replay", recording=recording)
    with pytest.raises(ScaleError, match="exists already"):
        record(program, 4, 2, recording.path)
    # A longer run than was recorded asks for a collective that is not there.
    index = recording.path / "recording.json"
    longer = tmp_path / "longer"
    longer.mkdir()
    stored = json.loads(index.read_text())
    by_step = {name: [[*rank, rank[-1]] for rank in stored[name]] for name in ("losses", "logprobs", "seconds")}
    stored |= {"steps": stored["steps"] + 1, **by_step}
    (longer / index.name).write_text(json.dumps(stored))
    recording.rank_file(1).rename(longer / recording.rank_file(1).name)
    with pytest.raises(ScaleError, match=r"asks for .* no further collective"):
        emulate(program, 4, 2, 1, level="replay", recording=longer)
    with pytest.raises(ScaleError, match="cannot be read"):
        emulate(program, 4, 2, 2, level="replay", recording=longer)
