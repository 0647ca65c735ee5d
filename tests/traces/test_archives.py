"""Archives of several files are read like directories: a bad file hides no other; hostile ones are refused."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moeproxy.errors import TraceError
from moeproxy.traces import read
from moeproxy.traces.logs.dispatch import UnknownKindError
from moeproxy.traces.logs.opening import HostileError, Limits
from tests.traces.logs.make import event, events, tarred, zipped

GOOD = b"".join(b'{"step": %d, "actor/lr": %g}\n' % (n, n / 4) for n in (1, 2))
VALUES = [0.25, 0.5]
UNKNOWN = {
    "img.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "weights.bin": bytes(99),
    "state.pkl": b"\x80\x04\x95\0",
    "data.parquet": b"PAR1\x15\x04",
}
BROKEN = {
    "cut.json": b'{"log_history": [\n',
    "cut.jsonl.gz": gzip.compress(GOOD * 9)[:12],
    "cut.db": b"SQLite format 3\0" + b"x" * 99,
    "bad.zip": b"PK\x03\x04" + b"x" * 99,
}


def _tgz(members: dict[str, bytes]) -> bytes:
    return gzip.compress(tarred(members))


Pack = Callable[[dict[str, bytes]], bytes]
packs = pytest.mark.parametrize("pack", [zipped, tarred, _tgz])


@packs
def test_what_is_no_log_is_left_out(tmp_path: Path, pack: Pack) -> None:
    others = {f"run/{name}": data for name, data in UNKNOWN.items()}
    config, notes = {"run/config.json": b'{"a": 1}', "__MACOSX/._a.jsonl": b"\0\5\x16\7"}, {"README": b"Hello.\n"}
    file = tmp_path / "x.archive"
    file.write_bytes(pack(others | {"run/a.jsonl": GOOD} | config | notes | {"b.jsonl": GOOD}))
    logs = read(file)
    assert [log.info.files for log in logs] == [(f"{file}!run/a.jsonl",), (f"{file}!b.jsonl",)]
    assert [log.trace.values("learning_rate").tolist() for log in logs] == [VALUES, VALUES]


@packs
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_member_does_not_hide_the_others(tmp_path: Path, pack: Pack, broken: str) -> None:
    file = tmp_path / "x.zip"
    file.write_bytes(pack({"a.jsonl": GOOD, broken: BROKEN[broken], "b.jsonl": GOOD}))
    for where in (file, tmp_path):
        first, bad, last = read(where)
        assert first.trace.values("learning_rate").tolist() == last.trace.values("learning_rate").tolist() == VALUES
        assert bad.info.container == "unreadable"
        assert bad.info.files == (f"{file}!{broken}",)
        with pytest.raises(TraceError, match=r"no metric in this log.*unreadable"):
            bad.trace  # noqa: B018 - reading it raises


def test_zip_members_damaged_encrypted_or_packed_in_an_unknown_way(tmp_path: Path) -> None:
    data = bytearray(zipped({"a.jsonl": GOOD, "b.jsonl": GOOD * 2, "c.jsonl": GOOD}))
    entry, whole = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1), bytes(data)
    damages = {
        "Bad CRC": (entry + 16, 0xFF),
        "encrypted": (entry + 8, 1),
        "compression": (entry + 10, 99),
    }
    for words, (place, flip) in damages.items():
        data = bytearray(whole)
        data[place] ^= flip
        (tmp_path / "x.zip").write_bytes(data)
        first, bad, last = read(tmp_path / "x.zip")
        assert (first.has_metrics, bad.has_metrics, last.has_metrics) == (True, False, True)
        assert words in bad.contents


@packs
@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("../b.jsonl", GOOD, "points out of the archive"),
        ("b.jsonl.gz", gzip.compress(GOOD + b"\n" * 3_000_000), "decompression bomb"),
        ("b.gz", gzip.compress(gzip.compress(gzip.compress(gzip.compress(GOOD)))), "archives within archives"),
        ("b.zip", zipped({f"{n}.jsonl": GOOD for n in range(9)}), "more than 8 files"),
        ("b.tar", tarred({"/etc/b.jsonl": GOOD}), "points out of the archive"),
    ],
    ids=["path", "bomb", "depth", "members", "path within"],
)
def test_a_hostile_member_refuses_the_whole(tmp_path: Path, pack: Pack, name: str, data: bytes, words: str) -> None:
    file = tmp_path / "x.zip"
    file.write_bytes(pack({"a.jsonl": GOOD, name: data}))
    with pytest.raises(HostileError, match=words):
        read(file, limits=Limits(grace=1 << 20, members=8))


@packs
def test_without_a_member_that_can_be_read_the_first_error_is_raised(tmp_path: Path, pack: Pack) -> None:
    file = tmp_path / "x.tar"
    file.write_bytes(pack({"cut.json": BROKEN["cut.json"], "cut.db": BROKEN["cut.db"]} | UNKNOWN))
    with pytest.raises(TraceError, match=r"!cut\.json: no JSON"):
        read(file)
    file.write_bytes(pack(UNKNOWN))
    with pytest.raises(UnknownKindError, match=r"!img\.png: binary data"):
        read(file)


@packs
@pytest.mark.parametrize("name", [*UNKNOWN, *BROKEN, "config.json", "notes.txt", "run.jsonl", "events.tfevents"])
def test_one_member_is_read_as_the_file_itself(tmp_path: Path, pack: Pack, name: str) -> None:
    more = {
        "config.json": b'{"a": 1}',
        "notes.txt": b"Hello.\n",
        "run.jsonl": GOOD,
        "events.tfevents": events(event(1, {})),
    }
    data = (UNKNOWN | BROKEN | more)[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "x").write_bytes(pack({name: data}))
    outcomes = []
    for file in (tmp_path / name, tmp_path / "x"):
        try:
            outcomes.append([(log.info.name, log.contents, log.has_metrics) for log in read(file)])
        except TraceError as error:
            outcomes.append((type(error), error.found))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("at", [0.1, 0.4, 0.8])
def test_damage_to_the_archive_itself_is_no_matter_of_a_member(tmp_path: Path, at: float) -> None:
    source = random.Random(0)
    rows = "".join(json.dumps({"step": n, "actor/lr": source.random()}) + "\n" for n in range(3000)).encode()
    data = bytearray(_tgz({"a.jsonl": rows, "b.jsonl": rows[::-1], "c.jsonl": rows}))
    data[int(len(data) * at)] ^= 0xFF
    (tmp_path / "x.tgz").write_bytes(data)
    with pytest.raises(TraceError, match="broken or truncated archive"):
        read(tmp_path / "x.tgz")
