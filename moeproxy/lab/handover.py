"""Hand a GRPO job over to verl: a config that verl's own validation accepts, a launch script, the names in its log.

python -m moeproxy.lab.handover --model Qwen3-30B-A3B --proxy proxy-32 --train-files train.parquet --out handover
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from moeproxy.errors import LabError, MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.files import atomic_dir, provenance
from moeproxy.lab.verl_job import OLD_LOG_PROBS, SETTINGS, VERL, VerlJob, verl_config
from moeproxy.lab.verl_log import log_keys
from moeproxy.proxy.cost import cost, devices

CONFIG = "grpo"
COLUMNS = ("prompt", "data_source", "reward_model")
_SCRIPT = """\
#!/bin/sh
# GRPO on {label} with verl {version}: {nodes} node(s) of {gpus} GPUs. Further arguments override single keys of the
# config (hydra's syntax). On several nodes start Ray on all of them first; this runs on the head node.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
log={log}
if [ -e "$log" ]; then
    echo "$log exists, and verl would empty it: move it away first" >&2
    exit 1
fi
exec python3 -m verl.trainer.main_ppo --config-path "$here" --config-name {config} "$@"
"""


def write_verl(job: VerlJob, out: str | Path, *, log: str | Path | None = None) -> Path:
    """Write everything that verl needs for a job into a new folder, all or nothing.

    The folder holds `grpo.yaml` (composed over verl's `ppo_trainer`), `run.sh`, `log_keys.json` (verl's metric names
    -> canonical signals) and `job.json` (the job, with provenance).

    Args:
        job: what to run.
        out: the new folder.
        log: JSON-lines file that verl will write; default: `log.jsonl` in the folder.

    Raises:
        CheckpointError: the model is no usable MoE checkpoint.
        LabError: the folder exists, or model and data do not fit the job.

    Example:
        >>> write_verl(VerlJob(Path("proxy"), (Path("train.parquet"),)), "handover")
    """
    check_inputs(job)
    folder = Path(out).expanduser().absolute()
    target = Path(log).expanduser().absolute() if log else folder / "log.jsonl"
    try:
        with atomic_dir(folder) as temporary:
            for name, text in _files(job, target).items():
                (temporary / name).write_text(text, encoding="utf-8")
            (temporary / "run.sh").chmod(0o755)
    except FileExistsError as error:
        raise LabError("the folder exists already", where=folder, remedy="choose another, or remove it") from error
    return folder


def _files(job: VerlJob, log: Path) -> dict[str, str]:
    script = _SCRIPT.format(
        label=job.label,
        version=VERL,
        nodes=job.nodes,
        gpus=job.gpus_per_node,
        log=shlex.quote(str(log)),
        config=CONFIG,
    )
    return {
        f"{CONFIG}.yaml": yaml.safe_dump(verl_config(job, log), sort_keys=False, allow_unicode=True),
        "run.sh": script,
        "log_keys.json": _json(log_keys(job, log)),
        "job.json": _json({"job": job.to_dict(), "provenance": provenance()}),
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def read_job(folder: str | Path) -> VerlJob:
    """Return the job that `write_verl` put into `folder`.

    Raises:
        LabError: the folder holds no job.
    """
    path = Path(folder).expanduser() / "job.json"
    try:
        return VerlJob.from_dict(json.loads(path.read_text(encoding="utf-8"))["job"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, MoeproxyError):
            raise
        raise LabError("no job of moeproxy's hand-over", where=path, expected="what write_verl wrote") from error


def check_inputs(job: VerlJob) -> None:
    """Check from metadata that model and data fit the job.

    Raises:
        CheckpointError: the model is no usable MoE checkpoint.
        LabError: attention heads that the rollout engine cannot share out, or data that verl could not read.
    """
    heads = Checkpoint.open(job.model).config.get("num_attention_heads")
    if isinstance(heads, int) and heads % job.tensor_parallel:
        raise LabError(
            f"{heads} attention heads cannot be shared by {job.tensor_parallel} devices",
            where=job.model,
            remedy="set tensor_parallel to a divisor of the heads",
        )
    rows = sum(_rows(path) for path in job.train_files)
    for path in job.val_files:
        _rows(path)
    if rows < job.settings.prompts:
        raise LabError(
            f"the train_files hold {rows} prompts, a step needs {job.settings.prompts}",
            remedy="lower prompts or add data",
        )
    if job.reward and not job.reward.is_file():
        raise LabError("no such file", where=job.reward, expected="a Python file with the reward function")


def _rows(path: Path) -> int:
    if not path.is_file():
        raise LabError("no such file", where=path, expected="a Parquet file in verl's layout")
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise LabError("the file is no Parquet", where=path, expected="a Parquet file in verl's layout") from error
    missing = [name for name in COLUMNS if name not in metadata.schema.to_arrow_schema().names]
    if missing:
        raise LabError(
            f"the columns {', '.join(missing)} are missing",
            where=path,
            expected=f"{', '.join(COLUMNS)}: chat messages, the task's source, its ground truth",
        )
    return metadata.num_rows


def placed(
    job: VerlJob,
    model: str | Path,
    *,
    device_gib: float = 80.0,
    per_node: int = 8,
    tensor_parallel: int | None = None,
) -> VerlJob:
    """Return the job on another model and the devices that it needs; nothing else changes.

    `moeproxy.proxy.cost.devices` says how many devices hold the training state; that is rounded up to a divisor of a
    node, or to whole nodes.

    Args:
        job: the job to take over.
        model: directory of the checkpoint; its folder's name becomes the label.
        device_gib: memory of one device in GiB.
        per_node: devices of a node.
        tensor_parallel: devices of one copy of the rollout engine where there are so many; default: as in `job`.

    Raises:
        CheckpointError: the model is no usable MoE checkpoint.
        LabError: the step's responses cannot be shared by these devices.
    """
    wanted = job.tensor_parallel if tensor_parallel is None else tensor_parallel
    if per_node < 1 or wanted < 1:
        raise LabError(f"per_node is {per_node}, tensor_parallel {wanted}", expected="at least 1")
    checkpoint = Checkpoint.open(Path(model))
    need = devices(cost(checkpoint), device_gib=device_gib)
    fitting = [n for n in range(1, per_node + 1) if per_node % n == 0 and n >= need]
    gpus, nodes = (fitting[0], 1) if fitting else (per_node, math.ceil(need / per_node))
    return replace(
        job,
        model=checkpoint.path,
        label=checkpoint.name.replace("/", "--"),
        nodes=nodes,
        gpus_per_node=gpus,
        tensor_parallel=math.gcd(wanted, gpus),
    )


def write_pair(job: VerlJob, models: Sequence[Path], out: Path, **sizes: Any) -> list[Path]:
    """Write one folder below `out` for each model, all with the settings of `job`.

    Everything is checked before the first folder is written.

    Args:
        job: settings, data and seed for all.
        models: directories of the original and its proxies.
        out: parent folder.
        sizes: `device_gib`, `per_node` and `tensor_parallel`, as in `placed`.

    Raises:
        CheckpointError: a model is no usable MoE checkpoint.
        LabError: a folder exists, two models have the same name, or a job cannot run.
    """
    jobs = [placed(job, model, **sizes) for model in models]
    labels = [item.label for item in jobs]
    if len(set(labels)) < len(labels):
        raise LabError(f"models of the same name: {', '.join(labels)}", remedy="rename a folder: names tell runs apart")
    for item in jobs:
        check_inputs(item)
        if (out / item.label).exists():
            raise LabError("the folder exists already", where=out / item.label, remedy="choose another --out")
    return [write_verl(item, out / item.label) for item in jobs]


def main(arguments: list[str] | None = None) -> int:
    """Command line: write the hand-over of a model and its proxies; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        folders = _write(options)
    except MoeproxyError as error:
        sys.stderr.write(f"moeproxy: {error}\n")
        return 1
    for folder in folders:
        job = read_job(folder)
        sys.stdout.write(f"{job.label}: {job.nodes} x {job.gpus_per_node} GPUs, sh {folder / 'run.sh'}\n")
    return 0


def _write(options: argparse.Namespace) -> list[Path]:
    job = VerlJob(
        model=options.model,
        train_files=tuple(options.train_files),
        val_files=tuple(options.val_files),
        settings=replace(SETTINGS, **{name: getattr(options, name) for name in _SETTINGS}),
        seed=options.seed,
        tensor_parallel=1,
        gpus_per_node=1,
        max_prompt_tokens=options.max_prompt_tokens,
        tokens_per_gpu=options.tokens_per_gpu,
        old_log_probs=options.old_log_probs,
        offload=options.offload,
        router_load=options.router_load,
        reward=options.reward,
    )
    sizes = {name: getattr(options, name) for name in ("device_gib", "per_node", "tensor_parallel")}
    return write_pair(job, [options.model, *options.proxy], options.out, **sizes)


_SETTINGS = ("steps", "prompts", "samples", "learning_rate", "beta", "temperature", "max_new_tokens")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write what verl needs to run GRPO on a model and its proxies.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the original (or of the only model)")
    parser.add_argument("--proxy", type=Path, nargs="*", default=[], help="directories of its proxies")
    parser.add_argument("--train-files", type=Path, nargs="+", required=True, help="Parquet files in verl's layout")
    parser.add_argument("--val-files", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True, help="folder for one new folder a model")
    parser.add_argument("--reward", type=Path, default=None, help="Python file with a compute_score function")
    for name in _SETTINGS:
        default = getattr(SETTINGS, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"({default})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device-gib", type=float, default=80.0, help="memory of one GPU in GiB (80)")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node (8)")
    parser.add_argument("--tensor-parallel", type=int, default=4, help="GPUs of one copy of the rollout engine (4)")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--tokens-per-gpu", type=int, default=32768)
    parser.add_argument("--old-log-probs", choices=OLD_LOG_PROBS, default="rollout", help="see VerlJob (rollout)")
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--router-load", action=argparse.BooleanOptionalAction, default=True)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
