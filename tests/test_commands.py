"""The command line, as a batch job calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moeproxy.__main__ import main
from moeproxy.commands import _ranges, _shown, read_texts
from moeproxy.errors import MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.statistics import ExpertProfile
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("a model with spaces") / "tïny", "qwen3_moe")


def test_inspect_profile_prune(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model)]) == 0
    said = capsys.readouterr().out
    assert "qwen3_moe" in said
    assert "counts a proxy can have: 2-8" in said
    assert "proxy-4" in said
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(tiny.TEXTS))
    profile = tmp_path / "profile.npz"
    assert main(["profile", str(model), str(texts), "--out", str(profile)]) == 0
    out = tmp_path / "proxy"
    command = ["prune", str(model), "--profile", str(profile), "--keep", "4", "--out", str(out)]
    assert main([*command, "--expert-parallel", "3"]) == 1
    assert "spread over 3 ranks" in capsys.readouterr().err
    assert main([*command, "--method", "frequency"]) == 0
    said = capsys.readouterr().out
    assert "reloads equal" in said
    assert "gate mass that loses its expert" in said
    assert main(command) == 1  # it exists
    assert str(out) in capsys.readouterr().err
    assert main(["inspect", str(out)]) == 0
    assert main(["prune", str(model), "--profile", str(profile), "--keep", "1", "--out", str(tmp_path / "no")]) == 1
    assert "cannot keep 1 experts" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.bad_types
def test_an_unknown_method_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(tiny.TEXTS))
    profile = tmp_path / "profile.npz"
    assert main(["profile", str(model), str(tmp_path / "texts.txt"), "--out", str(profile)]) == 0
    out = tmp_path / "proxy"
    options = ["--profile", str(profile), "--keep", "4", "--out", str(out), "--method", "typo"]
    assert main(["prune", str(model), *options]) == 1
    assert "frequency" in capsys.readouterr().err
    assert not out.exists()


def test_inspect_waits_for_no_slow_library(model: Path) -> None:
    code = (
        "import sys; from moeproxy.__main__ import main; main(['inspect', sys.argv[1]]); "
        "sys.exit(bool({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(model)], check=False, capture_output=True).returncode == 0


def test_a_streamed_profile_is_the_same(model: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(tiny.TEXTS))
    found = []
    for how in ("--stream", "--no-stream"):
        out = tmp_path / f"profile{how}.npz"
        assert main(["profile", str(model), str(tmp_path / "texts.txt"), "--out", str(out), how]) == 0
        found.append(ExpertProfile.load(out))
    assert np.array_equal(found[0].load_LE, found[1].load_LE)
    np.testing.assert_allclose(found[0].saliency_LE, found[1].saliency_LE, rtol=1e-6)


def _profile(model: Path, folder: Path, *options: str) -> tuple[int, Path]:
    (folder / "texts.txt").write_text("\n".join(tiny.TEXTS))
    out = folder / "profile.npz"
    return main(["profile", str(model), str(folder / "texts.txt"), "--out", str(out), *options]), out


def test_nothing_is_overwritten_and_nothing_lost_after_the_pass(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile.npz").write_text("mine")
    status, out = _profile(model, tmp_path)
    assert status == 1
    assert "exists already" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["profile", str(model), str(tmp_path / "texts.txt"), "--out", str(tmp_path / "p.bin")]) == 1
    assert main(["profile", str(model), str(tmp_path / "texts.txt"), "--out", str(out / "below.npz")]) == 1
    said = capsys.readouterr().err
    assert "saved as .npz" in said
    assert "could not be saved there" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "float17"], "one of auto, float32"),
        (["--device", "gpu"], "device 'gpu' cannot be used"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--stream", "--scratch", "/no/such/folder"], "scratch folder is not there"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    model: Path, tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _profile(model, tmp_path, *options)[0] == 1
    assert words in capsys.readouterr().err


def test_long_texts_are_refused_or_cut(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.txt").write_text("12+7=19\n" + "1" * 500)
    command = ["profile", str(model), str(tmp_path / "long.txt"), "--out", str(tmp_path / "long.npz")]
    assert main(command) == 1
    assert "text 1 has 500 tokens, but the model has 128 positions" in capsys.readouterr().err
    assert main([*command, "--max-tokens", "16"]) == 0
    assert ExpertProfile.load(tmp_path / "long.npz").n_tokens == 7 + 16


def test_the_profile_of_other_weights_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = _profile(model, tmp_path)
    assert status == 0
    trained = tiny.qwen3_moe()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.0 + 1e-5)
    other = tiny.save(trained, tmp_path / "other")
    assert Checkpoint.open(other).fingerprint == Checkpoint.open(model).fingerprint, "headers do not tell them apart"
    command = ["prune", str(other), "--profile", str(out), "--keep", "4", "--out", str(tmp_path / "proxy")]
    assert main(command) == 1
    assert "the router of layer 0 has other weights" in capsys.readouterr().err
    assert not (tmp_path / "proxy").exists()


def test_a_proxy_whose_check_fails_is_removed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = _profile(model, tmp_path)
    command = ["prune", str(model), "--profile", str(out), "--keep", "4", "--out", str(tmp_path / "proxy")]
    with monkeypatch.context() as patch:
        patch.setattr("moeproxy.proxy.build.check_paths", _interrupted)
        assert main(command) == 130
    assert not (tmp_path / "proxy").exists()
    with monkeypatch.context() as patch:
        patch.setattr("moeproxy.experts.stream_memory.free_bytes", lambda device: 1000)
        assert main(command) == 0, "too large to check is no failure"
    assert (tmp_path / "proxy").exists()


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_closed_pipe_is_no_error(model: Path) -> None:
    code = "import sys; from moeproxy.__main__ import main; sys.exit(main(['inspect', sys.argv[1]]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_texts_from_lines_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_texts(tmp_path / "a.txt", "text") == ["one", "two"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert read_texts(tmp_path / "b.jsonl", "prompt") == ["one", "two"]
    with pytest.raises(MoeproxyError, match="line 1 has no text under 'text'"):
        read_texts(tmp_path / "b.jsonl", "text")
    (tmp_path / "c.jsonl").write_text('{"text": null}\n')
    with pytest.raises(MoeproxyError, match="line 1 has no text"):
        read_texts(tmp_path / "c.jsonl", "text")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(MoeproxyError, match="no calibration text"):
        read_texts(tmp_path / "empty.txt", "text")
    with pytest.raises(MoeproxyError, match="cannot be read"):
        read_texts(tmp_path / "absent.txt", "text")


@pytest.mark.parametrize(
    ("values", "text"),
    [([4, 5, 6, 7], "4-7"), ([8, 12, 16, 20], "8-20 in steps of 4"), ([2, 3, 8], "2, 3, 8"), ([], "none")],
)
def test_counts_in_words(values: list[int], text: str) -> None:
    assert _ranges(values) == text


def test_inspect_shows_round_shares_that_are_possible() -> None:
    assert _shown(list(range(8, 129)), 128) == [112, 96, 80, 64, 48, 32, 16, 8]
    assert _shown([8, 16, 24, 32], 32) == [24, 16, 8]
    assert _shown([32], 32) == []


def test_inspect_for_programs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--json", "--expert-parallel", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == [2, 4, 6, 8]
    assert found["moe_layers"] == [0, 1, 2]
    assert [item["n_experts"] for item in found["costs"]] == [8, 6, 4, 2]
    assert found["costs"][0]["nbytes"] == sum(info.nbytes for info in Checkpoint.open(model).tensors.values())


def test_a_home_directory_is_found_behind_a_tilde(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    assert main(["inspect", f"~/{model.name}"]) == 0
