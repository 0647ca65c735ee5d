"""environment.yml and the exact pins name the same packages as pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CONDA_NAMES = {"pytorch-cpu": "torch"}
NOT_DEPENDENCIES = {"python", "pip"}


def _pyproject() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return _ranges(project["dependencies"])


def _extra(name: str) -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return _ranges(project["optional-dependencies"][name])


def _ranges(lines: list[str]) -> dict[str, str]:
    found = [Requirement(line) for line in lines]
    return {CONDA_NAMES.get(r.name, canonicalize_name(r.name)): str(r.specifier) for r in found}


def test_environment_yml_equals_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    lines = [line for line in environment["dependencies"] if isinstance(line, str)]
    conda = [line for line in lines if line.split("=")[0] not in NOT_DEPENDENCIES]
    pip = next(line["pip"] for line in environment["dependencies"] if isinstance(line, dict))
    assert pip[-1] == "-e .", "the project itself comes last"
    assert _ranges([*conda, *pip[:-1]]) == _pyproject()


def test_environment_yml_uses_one_channel_and_a_supported_python() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert "python=3.11" in environment["dependencies"]


PINNED = ["torch", "trl", "transformers", "ray", "submitit", "torchft", "nvidia-resiliency-ext", "pynvml"]


@pytest.mark.parametrize("name", PINNED)
def test_constraints_pin_within_the_allowed_range(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {r.name: r.specifier for r in map(Requirement, filter(None, (line.partition("#")[0] for line in lines)))}
    (pin,) = pins[name]
    assert pin.operator == "=="
    assert (
        pin.version in Requirement(f"{name}{(_pyproject() | _extra('cluster') | _extra('recovery'))[name]}").specifier
    )


def test_the_tests_install_what_a_cluster_and_recovery_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "moeproxy[cluster]" in project["optional-dependencies"]["test"]
    assert "moeproxy[recovery]" in project["optional-dependencies"]["test"]
    assert set(_extra("cluster")) == {"ray", "submitit"}
    assert set(_extra("recovery")) == {"ray", "torchft", "nvidia-resiliency-ext", "pynvml"}


def test_torch_warns_of_nothing_that_the_extras_bring() -> None:
    """With pynvml 13, which nvidia-resiliency-ext would take, every import of torch warns."""
    command = [sys.executable, "-W", "error", "-c", "import torch.cuda"]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
