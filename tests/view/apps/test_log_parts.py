"""Parts of the log panel: mapping, uploads, text, following, and the choice of a run to lay over."""

from __future__ import annotations

import gzip
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moeproxy.errors import MoeproxyError, TraceError
from moeproxy.traces import LogTrace, Trace
from moeproxy.traces.following import check_followable
from moeproxy.traces.pack import save_pack
from moeproxy.view.apps.log_follow import Following, fits
from moeproxy.view.apps.log_mapping import MOST_SHOWN, MappingEditor, columns_of, proposed
from moeproxy.view.apps.log_pair import NOTHING, OF_FILE, OF_LOG, PairChooser, lab_runs
from moeproxy.view.apps.log_source import LogSource, keep
from moeproxy.view.apps.log_text import log_html, notes_html, run_option
from moeproxy.view.apps.ui import Status
from tests.view.made_logs import jsonl, log_of, trace, verl

CSV = "iter,gnorm,avg_reward,note,who\n1,0.5,0.25,10,ann\n2,0.75,0.5,20,bob\n"


def _until(true: Callable[[], bool]) -> None:
    for _ in range(400):
        if true():
            return
        time.sleep(0.02)
    pytest.fail("it did not come true")


def test_columns_get_their_best_match_as_proposal(tmp_path: Path) -> None:
    log = log_of(tmp_path, CSV, "x.csv")
    assert columns_of(log) == ("iter", "gnorm", "avg_reward", "note")
    assert proposed(log) == {"gnorm": "grad_norm", "avg_reward": "reward_mean"}
    known = log_of(tmp_path, verl(range(1, 3), gnorm=1.0, ent=2.0))
    assert proposed(known)["actor/grad_norm"] == "grad_norm"
    assert "gnorm" not in proposed(known), "the signal is taken"


def test_editor_gives_what_its_lists_say(tmp_path: Path) -> None:
    editor = MappingEditor()
    editor.offer(log_of(tmp_path, CSV, "x.csv"))
    assert editor.lists["gnorm"].value == "grad_norm"
    assert editor.lists["note"].value == ""
    assert editor.step.options[0][0] == "as recognised: 'iter'"
    assert editor.step_key() is None
    editor.lists["note"].value = "kl"
    editor.find.value = "gno"
    assert list(editor.lists) == ["gnorm"]
    assert editor.mapping() == {"gnorm": "grad_norm", "avg_reward": "reward_mean", "note": "kl"}
    editor.lists["gnorm"].value = "kl"
    with pytest.raises(TraceError, match="'gnorm' and 'note' are both mapped to kl"):
        editor.mapping()
    editor.chosen = dict.fromkeys(editor.chosen, "")
    with pytest.raises(TraceError, match="no column is mapped"):
        editor.mapping()


def test_editor_shows_a_part_of_many_columns_and_finds_the_others(tmp_path: Path) -> None:
    editor = MappingEditor()
    row = {"step": 1, **{f"column{n}": 1.0 for n in range(40)}, "grad_norm": 2.0}
    editor.offer(log_of(tmp_path, jsonl(row), "x.jsonl"))
    assert len(editor.lists) == MOST_SHOWN
    assert next(iter(editor.lists)) == "grad_norm", "columns with a proposal come first"
    assert f"{42 - MOST_SHOWN} further columns" in editor._said.value
    editor.find.value = "COLUMN39"
    assert list(editor.lists) == ["column39"]


def test_an_upload_is_kept_and_nothing_is_overwritten(tmp_path: Path) -> None:
    first = keep("../../my log.txt", b"one", tmp_path)
    assert first == tmp_path / "my log.txt"
    assert keep("my log.txt", b"one", tmp_path) == first, "the same file again"
    second = keep("my log.txt", b"two", tmp_path)
    assert (second.name, first.read_bytes(), second.read_bytes()) == ("my log-2.txt", b"one", b"two")
    assert keep(".bashrc", b"x", tmp_path).name == "bashrc"
    assert keep("C:\\x\\a.tar.gz", b"x", tmp_path).name == "a.tar.gz"
    assert keep("a.tar.gz", b"y", tmp_path).name == "a-2.tar.gz"


def test_source_takes_an_upload_into_the_field(tmp_path: Path) -> None:
    told: list[Path] = []
    status = Status()
    (tmp_path / "examples").mkdir()
    for name in ("a.log", "README.md"):
        (tmp_path / "examples" / name).touch()
    source = LogSource(Path("x"), tmp_path / "examples", tmp_path, status, lambda: told.append(source.path))
    assert [label for label, _ in source.example.options] == ["–", "a.log"]
    source._uploaded({"new": ({"name": "run.log", "content": memoryview(b"abc")},)})
    assert told == [tmp_path / "run.log"]
    source.example.value = str(tmp_path / "examples" / "a.log")
    assert told[1:] == [tmp_path / "examples" / "a.log"]
    source.text.value = "  "
    with pytest.raises(TraceError, match="no path"):
        _ = source.path


def test_provenance_says_what_was_read_left_out_and_odd(tmp_path: Path) -> None:
    text = verl(range(1, 4)) + '{"step": 4, "actor/grad\n' + "Traceback (most recent call last):\n a\nKeyError: <x>\n"
    log = log_of(tmp_path, text + verl(range(2, 4)))
    page = log_html(log)
    for part in (
        "verl (",
        "x.log",
        "1 to 3, 3 of them, by &#x27;step&#x27;",
        "cut short",
        "resumed at step 2 after step 3",
    ):
        assert part in page
    assert "traceback on line 7: KeyError: &lt;x&gt;" in page
    assert "<x>" not in page
    assert run_option(1, log) == "1: x, verl, 3 steps"
    crashed = log_of(tmp_path, "Training:   0%|  | 0/58 [00:00<?]\nKilled\n", "y.log")
    assert "progress that ends at 0/58" in log_html(crashed)
    assert run_option(2, crashed) == "2: y, unknown, no metric"


def test_definition_notes_are_escaped_and_silent_without_any() -> None:
    assert notes_html({}) == ""
    assert "<strong>policy loss</strong>: a &lt; b" in notes_html({"policy_loss": "a < b"})


class Heard:
    """What a `Following` has taken."""

    def __init__(self, status: Status) -> None:
        self.logs: tuple[LogTrace, ...] = ()
        self.ended = threading.Event()
        self.following = Following(self.take, status, self.ended.set, look_s=0.02)

    def take(self, logs: tuple[LogTrace, ...]) -> None:
        self.logs = logs

    def steps(self) -> list[int]:
        return self.logs[0].trace.steps.index.tolist() if self.logs else []


def test_a_growing_log_is_followed_and_left(tmp_path: Path) -> None:
    status, path = Status(), tmp_path / "x.log"
    heard = Heard(status)
    heard.following.start(path)
    assert heard.following.running, "the file need not be there yet"
    path.write_text(verl(range(1, 3)))
    _until(lambda: heard.steps() == [1, 2])
    with path.open("a") as stream:
        stream.write(verl(range(3, 4)) + '{"step": 4, "actor/gra')
    _until(lambda: heard.steps() == [1, 2, 3])
    _until(lambda: "3 rows, the last at" in status.text)
    heard.following.stop()
    assert heard.following.join()
    assert not heard.following.running
    with path.open("a") as stream:
        stream.write('d_norm": 4.0}\n')
    looks = heard.following.looks
    time.sleep(0.1)
    assert (heard.following.looks, heard.steps()) == (looks, [1, 2, 3])


def test_silence_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeproxy.view.apps.log_follow._QUIET_S", 0.05)
    status = Status()
    heard = Heard(status)
    (tmp_path / "x.log").write_text(verl(range(1, 3)))
    heard.following.start(tmp_path / "x.log")
    _until(lambda: "2 rows, nothing new for 0 s" in status.text)
    heard.following.stop()


def test_a_failure_ends_the_following_and_is_shown(tmp_path: Path) -> None:
    status = Status()
    heard = Heard(status)
    heard.following._take = lambda _: 1 / 0  # type: ignore[assignment,return-value]
    (tmp_path / "x.log").write_text(verl(range(1, 3)))
    heard.following.start(tmp_path / "x.log")
    assert heard.ended.wait(10)
    assert "ZeroDivisionError" in status.text


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "x.log.gz"
    packed.write_bytes(gzip.compress(b"x"))
    for path in (packed, tmp_path):
        with pytest.raises(TraceError, match="cannot be followed"):
            check_followable(path)
    assert fits([log_of(tmp_path, verl(range(1, 3)))])
    assert not fits([log_of(tmp_path, CSV, "x.csv")])


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    trace("original", kl=[1.0]).save(folder / "original--healthy--s0--0123456789abcdef.parquet")
    trace(kl=[2.0]).save(folder / "cluster-16--kl_sign-1-at20--s3--fedcba9876543210.parquet")
    trace(kl=[3.0]).save(folder / "deeper" / "mine.parquet")
    return folder


def test_runs_of_the_lab_are_listed_unread_and_read_when_chosen(lab: Path, tmp_path: Path) -> None:
    found = lab_runs([lab, tmp_path / "absent"])
    assert [(run.model, run.words) for run in found] == [
        ("cluster-16", "kl_sign-1-at20, s3 (runs)"),
        ("other traces", "mine (deeper)"),
        ("original", "healthy, s0 (runs)"),
    ]
    assert found[0].read().values("kl").tolist() == [2.0]


def test_runs_of_a_pack_are_found_by_their_settings() -> None:
    from moeproxy.places import data_dir

    found = [run for run in lab_runs([data_dir() / "bench"]) if run.model == "cluster-16"]
    (chosen,) = [run for run in found if run.words == "gradient_overflow 1 from step 15, seed 0 (bench)"]
    run = chosen.read().provenance
    assert (run.model, run.fault, run.strength, run.seed, run.onset) == ("cluster-16", "gradient_overflow", 1.0, 0, 15)
    healthy = [run for run in lab_runs([data_dir() / "bench"]) if run.words.startswith("healthy, seed 0,")]
    assert healthy[0].read().provenance.healthy
    assert math.isclose(healthy[0].read().provenance.config["learning_rate"], 1.5e-4)


def test_a_pack_without_the_run_is_an_error(tmp_path: Path) -> None:
    save_pack([trace(kl=[1.0])], tmp_path / "p.parquet")
    header = "model,method,n_experts,fault,family,level,strength,onset,seed,learning_rate,temperature,key,pack\n"
    (tmp_path / "registry.csv").write_text(f"{header}cluster-16,cluster,16,,,,,,7,0.1,1.0,ab,p.parquet\n")
    (run,) = lab_runs([tmp_path])
    with pytest.raises(TraceError, match="'ab' is not in its pack"):
        run.read()


class Chooser:
    """A `PairChooser` that counts its changes."""

    def __init__(self, folders: list[Path]) -> None:
        self.changes, self.status = 0, Status()
        self.pair = PairChooser(folders, self.status, self._changed)

    def _changed(self) -> None:
        self.changes += 1


def test_a_run_of_the_lab_is_chosen_by_model_and_words(lab: Path) -> None:
    chooser = Chooser([lab])
    assert chooser.pair.selected() is None
    chooser.pair.choose("original", "healthy")
    first = chooser.pair.selected()
    assert isinstance(first, Trace)
    assert first.values("kl").tolist() == [1.0]
    assert chooser.pair.selected() is first, "read once"
    seen = chooser.changes
    chooser.pair.model.value = "cluster-16"
    assert chooser.changes > seen, "another model under the same number is a change"
    second = chooser.pair.selected()
    assert isinstance(second, Trace)
    assert second.values("kl").tolist() == [2.0]
    with pytest.raises(MoeproxyError, match="no run of 'cluster-16' that is 'healthy'"):
        chooser.pair.choose("cluster-16", "healthy")
    chooser.pair.kind.value = NOTHING
    assert chooser.pair.selected() is None


def test_without_runs_of_the_lab_it_says_so(tmp_path: Path) -> None:
    chooser = Chooser([tmp_path / "absent"])
    with pytest.raises(MoeproxyError, match="no run of 'original'"):
        chooser.pair.choose("original", "healthy")
    assert "no run of the lab" in chooser.status.text


def test_other_runs_of_the_log_and_second_files_can_be_laid_over(lab: Path, tmp_path: Path) -> None:
    chooser, pair = (made := Chooser([])), made.pair
    logs = (log_of(tmp_path, verl(range(1, 3)), "a.log"), log_of(tmp_path, "Killed\n", "b.log"))
    pair.others(logs)
    pair.kind.value = OF_LOG
    assert pair.selected() is logs[0]
    assert len(pair.which.options) == 1, "a log without metrics cannot be drawn"
    pair.kind.value = OF_FILE
    assert pair.selected() is None
    pair.path.value = str(lab / "deeper" / "mine.parquet")
    pair.open.click()
    opened = pair.selected()
    assert isinstance(opened, Trace)
    assert opened.values("kl").tolist() == [3.0]
    pair.path.value = str(tmp_path / "a.log")
    pair.open.click()
    assert isinstance(pair.selected(), LogTrace)
    for path, said in ((str(tmp_path / "b.log"), "no metric in it; it contains"), ("", "no path")):
        pair.path.value = path
        pair.open.click()
        assert said in chooser.status.text
