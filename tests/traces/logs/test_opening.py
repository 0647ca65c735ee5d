"""Files and archives: all that is honest opens, what is hostile is refused quickly."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeproxy.errors import TraceError
from moeproxy.traces.logs.opening import Limits, sources
from tests.traces.logs.make import tarred, zipped, zstd

LOG = b'{"step": 1, "loss": 0.5}\n'
SMALL = Limits(ratio=20, grace=100_000, members=5, depth=2)


def _read(path: Path, limits: Limits | None = None) -> dict[str, bytes]:
    found = {}
    for source in sources(path, limits):
        peeked = source.peek()
        data = source.stream.read()
        assert data.startswith(peeked)
        found[source.name.replace(str(path), "")] = data
    return found


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (LOG, {"": LOG}),
        (b"", {"": b""}),
        (gzip.compress(LOG), {"": LOG}),
        (bz2.compress(LOG), {"": LOG}),
        (lzma.compress(LOG), {"": LOG}),
        (zstd(LOG), {"": LOG}),
        (tarred({"a.log": LOG, "b/c.log": LOG * 2}), {"!a.log": LOG, "!b/c.log": LOG * 2}),
        (tarred({"a.log": LOG}, "w:gz"), {"!a.log": LOG}),
        (zipped({"a.log": LOG, "b/c.log": b""}), {"!a.log": LOG, "!b/c.log": b""}),
        (zipped({"in.gz": gzip.compress(LOG)}), {"!in.gz": LOG}),
        (gzip.compress(zipped({"a.log": LOG})), {"!a.log": LOG}),
        (zipped({"runs.tar": tarred({"a": LOG})}), {"!runs.tar!a": LOG}),
    ],
    ids=["plain", "empty", "gz", "bz2", "xz", "zst", "tar", "tgz", "zip", "gz in zip", "zip in gz", "tar in zip"],
)
def test_opens(tmp_path: Path, data: bytes, found: dict[str, bytes]) -> None:
    file = tmp_path / "log"
    file.write_bytes(data)
    assert _read(file) == found


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd])
def test_bombs_are_refused_before_they_unfold(tmp_path: Path, pack) -> None:
    file = tmp_path / "bomb"
    file.write_bytes(pack(b"\0" * 20_000_000))
    came = []

    def unfold() -> None:
        for source in sources(file, SMALL):
            while data := source.stream.read(65_536):
                came.append(len(data))

    with pytest.raises(TraceError, match="decompression bomb"):
        unfold()
    assert sum(came) < 5_000_000


def test_a_compressible_log_is_no_bomb(tmp_path: Path) -> None:
    file = tmp_path / "log.gz"
    lines = b"".join(b'{"step": %d, "loss": %f}\n' % (n, 1 / (n + 1)) for n in range(20_000))
    file.write_bytes(gzip.compress(lines))
    assert _read(file, SMALL) == {"": lines}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (zipped({"a": b"\0" * 5_000_000}), "claim to hold 5,000,000"),
        (zipped({f"{n}": b"" for n in range(6)}), "more than 5 files"),
        (tarred({f"{n}": b"" for n in range(6)}), "more than 5 files"),
        (zipped({"../../etc/cron": LOG}), "points out of the archive"),
        (tarred({"/etc/passwd": LOG}), "points out of the archive"),
        (zipped({"c:\\x": LOG}), "points out of the archive"),
        (gzip.compress(gzip.compress(gzip.compress(LOG))), "3 deep"),
        (gzip.compress(LOG)[:10], "broken or truncated"),
        (zipped({"a": LOG})[:-20], "broken or truncated"),
        (tarred({"a": b"x" * 9000}, "w:gz")[:80], "broken or truncated"),
    ],
    ids=["zip bomb", "zip members", "tar members", "zip ..", "tar /", "drive", "depth", "gz cut", "zip cut", "tgz cut"],
)
def test_hostile_archives_are_refused(tmp_path: Path, data: bytes, error: str) -> None:
    file = tmp_path / "archive"
    file.write_bytes(data)
    with pytest.raises(TraceError, match=error):
        _read(file, SMALL)


def test_links_and_devices_are_passed_over(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        device = tarfile.TarInfo("device")
        device.type = tarfile.CHRTYPE
        archive.addfile(device)
    (tmp_path / "t.tar").write_bytes(out.getvalue())
    assert _read(tmp_path / "t.tar") == {}


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        list(sources(tmp_path / "none"))


@settings(max_examples=60)
@given(st.sampled_from([gzip.compress(LOG * 9), zipped({"a": LOG}), tarred({"a": LOG}), zstd(LOG)]), st.data())
def test_damage_is_an_error_or_no_matter(tmp_path_factory: pytest.TempPathFactory, whole: bytes, data) -> None:
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("damage") / "x"
    file.write_bytes(damaged)
    with contextlib.suppress(TraceError):
        assert len(_read(file, SMALL)) <= 1


ROWS = [f'{{"step": {n}, "loss": {n * 0.37 % 1:.17g}}}\n'.encode() for n in range(20_000)]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstd])
@pytest.mark.parametrize("share", [0.6, 0.95])
def test_what_came_before_a_cut_is_read(tmp_path: Path, compress: Callable[[bytes], bytes], share: float) -> None:
    whole = b"".join(ROWS) * (4 if compress is bz2.compress else 1)  # bzip2 gives nothing before its first 900 kB
    packed = compress(whole)
    (tmp_path / "x.gz").write_bytes(packed[: int(len(packed) * share)])
    (source,) = list(_held(tmp_path / "x.gz"))
    data, cut = source
    assert whole.startswith(data)
    assert share / 4 < len(data) / len(whole) < 1
    assert cut == str(tmp_path / "x.gz")


def test_a_tar_cut_short_gives_its_first_members(tmp_path: Path) -> None:
    packed = tarred({"a.jsonl": b"".join(ROWS), "b.jsonl": b"".join(ROWS)}, "w:gz")
    (tmp_path / "x.tgz").write_bytes(packed[: len(packed) * 3 // 4])
    found = list(_held(tmp_path / "x.tgz"))
    assert [bool(cut) for _, cut in found] == [False, True, True]
    assert found[0][0] == b"".join(ROWS)
    assert b"".join(ROWS).startswith(found[1][0])
    assert len(found[1][0]) > 10_000


def test_a_whole_archive_is_not_called_cut(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(LOG))
    assert list(_held(tmp_path / "x.gz")) == [(LOG, "")]


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_a_damaged_archive_is_refused(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    packed = bytearray(compress(b"".join(ROWS)))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "x.gz").write_bytes(packed)
    with pytest.raises(TraceError, match="broken or truncated"):
        list(_held(tmp_path / "x.gz"))


def _held(path: Path) -> Iterator[tuple[bytes, str]]:
    for source in sources(path):
        yield source.stream.read(), source.cut
