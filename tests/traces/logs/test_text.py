"""JSON lines and consoles, each with values checked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moeproxy.traces.logs.cells import WORDS, Status
from moeproxy.traces.logs.sink import Sink
from tests.traces.logs.make import sink_of


def _rows(tmp_path: Path, text: str | bytes, run: str = "") -> tuple[list[dict[str, Any]], Sink]:
    """Return every row as a dict of numbers, or words for what is none."""
    file = tmp_path / "x.log"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    sink = sink_of(file)
    if run not in sink.runs:
        return [], sink
    rows = sink.runs[run].store.finish()
    found: list[dict[str, Any]] = [{} for _ in range(len(rows))]
    for name, column in rows.columns.items():
        for at, value, state in zip(column.at, column.values, column.status, strict=True):
            plain = state in (Status.MEASURED, Status.NUMBER_TEXT)
            found[at][name] = float(value) if plain else column.texts.get(int(at), WORDS[Status(state)])
    return found, sink


def test_json_lines_keep_null_nan_and_absent_apart(tmp_path: Path) -> None:
    rows, sink = _rows(
        tmp_path, '{"step":1,"a":0.5}\n{"step":2,"a":null}\n{"step":3,"a":NaN}\n{"step":4,"b":-Infinity}\n'
    )
    assert rows == [
        {"step": 1.0, "a": 0.5},
        {"step": 2.0, "a": "null"},
        {"step": 3.0, "a": "nan"},
        {"step": 4.0, "b": "neg inf"},
    ]
    assert sink.container == "JSON lines"
    assert sink.lines == 4


def test_verl_file_logger_writes_nan_as_null(tmp_path: Path) -> None:
    rows, sink = _rows(tmp_path, '{"step":1,"data":{"actor/grad_norm":null,"actor/lr":1e-6}}\n')
    assert rows == [{"step": 1.0, "actor/grad_norm": "nonfinite", "actor/lr": 1e-6}]
    assert "verl file logger" in sink.hints


def test_envelopes_and_nesting(tmp_path: Path) -> None:
    text = '{"step": 3, "metrics": {"actor/lr": 0.1}}\n{"step": 4, "a": {"b": {"c": 1}, "d": [1, 2]}}\n'
    rows, _ = _rows(tmp_path, text)
    assert rows == [{"step": 3.0, "actor/lr": 0.1}, {"step": 4.0, "a/b/c": 1.0, "a/d": "[1, 2]"}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "objects nested too deeply"),
        ('{"a": ' * 30 + "1" + "}" * 30, "objects nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of more than 4300 digits"),
        ('{"a": 1, "b"', "cut short"),
        ('{"a": 1, b}', "starts like JSON but is none"),
    ],
)
def test_lines_that_cannot_be_read_are_named(tmp_path: Path, line: str, reason: str) -> None:
    rows, sink = _rows(tmp_path, f'{{"step": 1, "a": 2}}\n{line}\n{{"step": 2, "a": 3}}\n')
    assert [row["a"] for row in rows] == [2.0, 3.0]
    assert [(skipped.reason, skipped.lines) for skipped in sink.skipped.values()] == [(reason, [2])]


def test_a_key_twice_is_said(tmp_path: Path) -> None:
    rows, sink = _rows(tmp_path, '{"step": 1, "a": 2, "a": 3}\n')
    assert rows == [{"step": 1.0, "a": 3.0}]
    assert "a key twice" in sink.notes[0]


def test_transformers_console(tmp_path: Path) -> None:
    text = (
        "  0%|          | 0/4 [00:00<?, ?it/s]\r 25%|██▌       | 1/4 [00:01<00:03,  1.0s/it]\r"
        "                                             \r{'loss': '2.58', 'grad_norm': 'nan', 'epoch': '0.25'}\r"
        " 50%|█████     | 2/4 [00:02<00:02]{'loss': '2.4', 'grad_norm': '3.1', 'epoch': '0.5'}{'loss': 0.0}\n"
    )
    rows, sink = _rows(tmp_path, text)
    assert rows == [
        {"loss": 2.58, "grad_norm": "nan text", "epoch": 0.25},
        {"loss": 2.4, "grad_norm": 3.1, "epoch": 0.5},
        {"loss": 0.0},
    ]
    assert sink.progress is not None
    assert sink.progress.text == "2/4"


def test_verl_console(tmp_path: Path) -> None:
    text = (
        "\x1b[36m(TaskRunner pid=12)\x1b[0m step:1 - actor/pg_loss:-0.125 - actor/lr:np.float64(1e-06) - "
        "val-core/a:b/acc/mean@8:0.5 - critic/score/max:nan\x1b[0m\n"
        "(main_task pid=7, ip=10.0.0.1) ('step:2 - actor/lr(1e-4):0.010 - y:np.float64(0.5)')\n"
        "(main_task pid=7, ip=10.0.0.1) step:3 - y:np.float64(0.75) - x:inf [repeated 2x across cluster]\n"
        "\x1b[36m(WorkerDict pid=13)\x1b[0m nothing here\n"
    )
    rows, sink = _rows(tmp_path, text)
    assert rows == [
        {
            "step": 1.0,
            "actor/pg_loss": -0.125,
            "actor/lr": 1e-6,
            "val-core/a:b/acc/mean@8": 0.5,
            "critic/score/max": "nan",
        },
        {"step": 2.0, "actor/lr(1e-4)": 0.01, "y": 0.5},
        {"step": 3.0, "y": 0.75, "x": "pos inf"},
    ]
    assert sink.runs[""].store.finish().origin_names == ("TaskRunner pid=12", "main_task pid=7, ip=10.0.0.1")
    assert sink.hints == {"step:- line"}


def test_a_line_of_very_many_parts_is_bounded(tmp_path: Path) -> None:
    rows, sink = _rows(tmp_path, "step:1" + "".join(f" - k{n}:0.5" for n in range(6000)) + "\n")
    assert len(rows[0]) == 5000
    assert [skipped.count for skipped in sink.skipped.values()] == [1]


def test_megatron_console(tmp_path: Path) -> None:
    text = (
        " [2025-01-01 00:00:00] iteration        5/     100 | consumed samples:          640 | elapsed time per"
        " iteration (ms): 250.5 | learning rate: 1.000000E-04 | lm loss: 7.5E+00 | loss scale: 1.0 | grad norm: nan |"
        " number of skipped iterations:   1 | number of nan iterations:   0 |\n"
    )
    rows, _ = _rows(tmp_path, text)
    assert rows == [
        {
            "iteration": 5.0,
            "total iterations": 100.0,
            "consumed samples": 640.0,
            "elapsed time per iteration (ms)": 250.5,
            "learning rate": 1e-4,
            "lm loss": 7.5,
            "loss scale": 1.0,
            "grad norm": "nan",
            "number of skipped iterations": 1.0,
            "number of nan iterations": 0.0,
        }
    ]


def test_headers_give_the_step_and_dicts_may_span_lines(tmp_path: Path) -> None:
    text = (
        "✨ Global step 4: {'policy_loss': 0.5, 'reward': 1.0}\n"
        "(Trainer pid=1) step 7: {'train/loss': 0.25, 'train/step': 7}\n"
        "Step 9:\n"
        "INFO Step 9: {'policy/grad_norm': '1.5',\n 'policy/policy_kl': '0.01',\n 'reward/avg_raw_reward': 'inf'}\n"
    )
    rows, _ = _rows(tmp_path, text)
    assert rows == [
        {"step": 4.0, "policy_loss": 0.5, "reward": 1.0},
        {"train/loss": 0.25, "train/step": 7.0},
        {"step": 9.0, "policy/grad_norm": 1.5, "policy/policy_kl": 0.01, "reward/avg_raw_reward": "pos inf text"},
    ]


@pytest.mark.parametrize("mark", ["'", '"'])
def test_roll_console(tmp_path: Path, mark: str) -> None:
    text = "INFO [x.py (9)] metrics_tag: {'step': 3, 'metrics': {'actor/total_loss': 0.5, 'system/x@sum': NaN}}\n"
    rows, _ = _rows(tmp_path, text.replace("'", mark))
    assert rows == [{"step": 3.0, "actor/total_loss": 0.5, "system/x@sum": "nan"}]


def test_configurations_are_no_metrics(tmp_path: Path) -> None:
    text = (
        "{'actor': {'clip_ratio': 0.2,\n           'optim': {'lr': 1e-06},\n           'x': {'loss': 1}},\n"
        " 'end': 1}\n"
        "{'a': {'b': 1}}\n"
        "{'loss': 0.5}\n"
    )
    rows, sink = _rows(tmp_path, text)
    assert rows == [{"loss": 0.5}]
    assert [skipped.lines for skipped in sink.skipped.values()] == [[1]]


def test_a_dict_that_is_cut_off_hides_only_itself(tmp_path: Path) -> None:
    rows, sink = _rows(tmp_path, "{'loss': 0.5, 'x\n{'loss': 0.25}\nstep 3: {'loss': 1,\n{'loss': 2}\n")
    assert {"loss": 0.25} in rows
    assert sink.skipped


def test_crash_without_metrics(tmp_path: Path) -> None:
    text = (
        "Map: 100%|##########| 58/58 [00:01<00:00]\n  0%|          | 0/58 [00:00<?, ?it/s]\n"
        "(Actor pid=3) Traceback (most recent call last):\n"
        '(Actor pid=3)   File "a.py", line 1, in f\n(Actor pid=3)     raise\n'
        "(Actor pid=3) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nKilled\n"
    )
    rows, sink = _rows(tmp_path, text)
    assert rows == []
    assert [(finding.kind, finding.line) for finding in sink.findings] == [
        ("traceback", 6),
        ("out of memory", 6),
        ("killed", 7),
    ]
    assert sink.progress is not None
    assert (sink.progress.text, sink.progress.line) == ("0/58", 2)


def test_ray_names_the_error_at_the_end_of_the_remote_traceback(tmp_path: Path) -> None:
    text = (
        "Traceback (most recent call last):\n  File x\nray.exceptions.RayTaskError(KeyError): ray::f()\n"
        "  File y\nKeyError: 'reward'\n{'not': 'inside'}\n"
    )
    _, sink = _rows(tmp_path, text)
    assert [finding.text for finding in sink.findings][-1] == "KeyError: 'reward'"


def test_fenced_logs_bad_bytes_and_line_ends(tmp_path: Path) -> None:
    text = "\ufeff# Report\r\n\r\n```\r\nstep:1 - a:0.5 - ".encode() + b"\xff:1\r\n```\r\nstep:2 - a:0.25\r\n"
    rows, sink = _rows(tmp_path, text)
    assert rows == [{"step": 1.0, "a": 0.5, "\ufffd": 1.0}, {"step": 2.0, "a": 0.25}]
    assert "line 4" in sink.notes[0]


def test_json_lines_amid_other_output(tmp_path: Path) -> None:
    text = 'starting\n{"step": 1, "loss": 0.5}\n[rank0]: {"step": 2, "loss": 0.25}\nbye\n'
    rows, sink = _rows(tmp_path, text)
    assert rows == [{"step": 1.0, "loss": 0.5}, {"step": 2.0, "loss": 0.25}]
    assert sink.runs[""].store.finish().lines.tolist() == [2, 3]


def test_many_layouts_are_refused(tmp_path: Path) -> None:
    from moeproxy.errors import TraceError

    text = "".join(json.dumps({f"key{n}-{m}": n for m in range(300)}) + "\n" for n in range(70))
    with pytest.raises(TraceError, match="over 20,000 different keys"):
        _rows(tmp_path, text)


@pytest.mark.parametrize("chunk", [1, 3, 20, 1 << 18])
def test_chunks_do_not_matter(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeproxy.traces.logs.lines._CHUNK", chunk)
    text = "dull\nmore of it\n 3/9 [00:01]\rdull\n{'loss': 0.5}\r\nstep:1 - a:0.5 - b:1\nKilled"
    rows, sink = _rows(tmp_path, text)
    assert rows == [{"loss": 0.5}, {"step": 1.0, "a": 0.5, "b": 1.0}]
    assert [(finding.kind, finding.line) for finding in sink.findings] == [("killed", 6)]
    assert sink.progress is not None
    assert (sink.progress.text, sink.progress.line, sink.lines) == ("3/9", 3, 6)


def test_blocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f'{{"step": {n}, "{"a" if n % 3 else "b"}": {n / 4}}}\n' for n in range(50))
    whole, _ = _rows(tmp_path, text)
    monkeypatch.setattr("moeproxy.traces.logs.rows.BLOCK", 4)
    assert _rows(tmp_path, text)[0] == whole
    # Nor does it matter from when on rows of ever new keys are taken apart.
    monkeypatch.setattr("moeproxy.traces.logs.rows.MAX_LAYOUTS", 1)
    assert _rows(tmp_path, text)[0] == whole
    assert whole[4] == {"step": 4.0, "a": 1.0}
    assert not math.isnan(whole[3]["b"])


def test_prime_rl_console(tmp_path: Path) -> None:
    text = (
        "12:00:00 SUCCESS Step 5 | 1h44m | Loss 0.125 | Entropy: 0.5 | Mismatch KL 0.0250 | Grad. Norm nan | "
        "Throughput 1200 tokens/s | Max Vio 6.1000\n"
    )
    rows, sink = _rows(tmp_path, text)
    assert rows == [
        {
            "step": 5.0,
            "Loss": 0.125,
            "Entropy": 0.5,
            "Mismatch KL": 0.025,
            "Grad. Norm": "nan",
            "Throughput": 1200.0,
            "Max Vio": 6.1,
        }
    ]
    assert sink.hints == {"Step N | line"}


def test_versions(tmp_path: Path) -> None:
    text = '  "transformers_version": "5.24.0",\nRequirement trl==1.16.0 ok\nvLLM version v0.9.1\nverl is version 3\n'
    _, sink = _rows(tmp_path, text)
    assert sink.versions == {"transformers": "5.24.0", "trl": "1.16.0", "vllm": "0.9.1"}
