"""A small log of every source, as its program writes it: what fuzzing mutates and what containers must not change."""

from __future__ import annotations

import json
import math
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from tests.traces.logs.make import event, events
from tests.traces.logs.test_databases import MLFLOW, TRACKIO
from tests.traces.logs.test_printed import NEMO
from tests.traces.logs.test_swanlabfile import finish, line, point, scalar, start, swanlab
from tests.traces.logs.test_wandbfile import EXIT, RUN, history, output, wandb

_ROWS = [{"step": n, "loss": 0.5 + n, "grad_norm": 1.25, "learning_rate": 1e-6, "epoch": n / 8} for n in range(4)]
_VERL = "(T pid=1) step:{n} - actor/lr:np.float64(1e-06) - actor/grad_norm:1.{n} - critic/score/mean:{x}\n"
_SWIFT = {"loss": 1.5, "grad_norm": 1.0, "memory(GiB)": 3, "train_speed(iter/s)": 1}
_AREAL = (
    "20260101-00:00:00.1 StatsLogger INFO: Epoch 1/5 Step {n}/9 Train step {n}/45 done.\n"
    "╒════╤═══╤═════╤═══╕\n│ ppo_actor/update/actor_loss/avg │ 5.0000e-01 │ ppo_actor/update/lr │ {n}e-6 │\n"
    "├────┼───┼─────┼───┤\n│ ppo_actor/update/grad_norm │ nan │  │  │\n╘════╧═══╧═════╧═══╛\n"
)
_BAR = (
    "Episode [1/2]:  33%|###  | {n}/3 [00:00<00:00, 9.41it/s, act_loss=0.12{n}, kl=0.01, act_lr=5e-7, grad_norm=0.3]\r"
)
_MEGATRON = " iteration {n}/ 9 | lm loss: 5.{n}E-01 | grad norm: nan | number of nan iterations: 1 |\n"
_STRINGS = "{{'loss': '{}', 'grad_norm': '{}', 'learning_rate': '1e-06', 'epoch': '{}'}}\r"
_SKYRL = "INFO Step 9: {'policy/grad_norm': '1.5',\n 'policy/policy_kl': '0.01',\n 'reward/avg_raw_reward': 'inf'}\n"
_SLIME = "rollout 0: {'rollout/raw_reward': 0.5, 'rollout/step': 0}\nstep 0: {'train/loss': 1.0, 'train/step': 0}\n"
_RANKS = [f"[rank{r}]: step:{n} - actor/grad_norm:{r}.{n} - actor/lr:1e-6\n" for n in (1, 2) for r in (0, 1)]
_GOLDEN = {"lm loss": {"values": {"1": 0.5, "2": "nan"}}, "num-zeros": {"values": {"1": 3, "2": 4}}}
_DIED = "  0%|   | 0/58 [00:00<?]\nTraceback (most recent call last):\n  File x\nKeyError: 'reward'\n"


def _database(statement: str, rows: list[tuple]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.db"
        with closing(sqlite3.connect(path)) as base:
            base.execute(statement)
            base.executemany(f"INSERT INTO metrics VALUES ({', '.join('?' * len(rows[0]))})", rows)
            base.commit()
        return path.read_bytes()


def _lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


_TEXT = {
    "jsonl": _lines(_ROWS),
    "state": json.dumps({"log_history": [*_ROWS, {"step": 4, "loss": 0.0, "grad_norm": math.nan}]}, indent=1),
    "console": "".join(f"  1%| | {n}/9 [0<0]\r{row}\n" for n, row in enumerate(_ROWS)),
    "strings": _STRINGS.format("2.58", "nan", "0.25") + _STRINGS.format("0", "3.1", "0.5") + "\n",
    "verl": "".join(_VERL.format(n=n, x="nan" if n == 2 else n / 4) for n in range(4)),
    "verl file": _lines([{"step": n, "data": {"actor/grad_norm": n / 4 if n else None}} for n in range(4)]),
    "megatron": "".join(_MEGATRON.format(n=n) for n in range(4)),
    "golden": json.dumps(_GOLDEN),
    "csv": "step,loss,grad_norm\n1,0.5,1.25\n2,,nan\n3,1.5,1.25\n",
    "wandb csv": '"Step","a - loss","a - loss__MIN","a - loss__MAX"\n"0","0.5","0.5","0.5"\n"1","","",""\n',
    "wandb api": _lines([{"_step": n, "_runtime": n, "actor/lr": 0.5, "actor/grad_norm": "NaN"} for n in range(3)]),
    "swift": _lines([{**_SWIFT, "global_step/max_steps": f"{n}/9"} for n in (5, 6)]),
    "llama factory": _lines([{"current_steps": n, "total_steps": 9, "loss": 0.5, "lr": 1e-5} for n in range(3)]),
    "openrlhf": "Global step 4: {'policy_loss': 0.5, 'actor_lr': 1e-6, 'actor_grad_norm': 2.0, 'vllm_kl': 0.1}\n",
    "openrlhf bar": "".join(_BAR.format(n=n) for n in range(3)) + "\n",
    "slime": _SLIME,
    "nemo": NEMO,
    "nemo jsonl": _lines([{"step": n, "train/gen_kl_error": 0.5, "train/probs_ratio_max": -1.0} for n in range(3)]),
    "areal": _AREAL.format(n=1) + _AREAL.format(n=2),
    "skyrl": _SKYRL,
    "roll": 'x metrics_tag: {"step": 3, "metrics": {"actor/total_loss": 0.5, "actor/approxkl": 0.25}}\n',
    "prime": "SUCCESS Step 5 | 1h44m | Loss 0.125 | Mismatch KL 0.0250 | Grad. Norm nan | Max Vio 6.1000\n",
    "prime jsonl": _lines([{"step": 1, "optim/grad_norm": 0.5}, {"step": 1, "loss/mean": 0.25}]),
    "ranks": "".join(_RANKS),
    "resume": _lines([{"step": n, "actor/grad_norm": n / 4, "actor/lr": 1e-6} for n in (1, 2, 3, 4, 2, 3)]),
    "died": _DIED,
    "fenced": "# Report\n\n```\n" + _VERL.format(n=1, x=0.5) + "```\nand\n```json\n" + _lines(_ROWS[:1]) + "```\n",
}
_SAID = (output("step:1 - actor/grad_norm:0.5 - actor/lr:1e-6\n"), output(_DIED, error=True))
_OLD = b'{"model_type": "Experiment", "data": {"name": "sunny"}}\n'
_BINARY = {
    "events": events(event(1, {"train/loss": 0.5, "train/epoch": 0.25}), event(2, {"train/loss": 1.5}, tensor=True)),
    "wandb": wandb(
        RUN, history(0, {"actor/lr": "0.5", "x": "NaN"}), history(1, {"actor/lr": "0.25"}, nested=True), EXIT
    ),
    "wandb said": wandb(RUN, *_SAID, EXIT),
    "swanlab": swanlab(start("a"), scalar("actor/lr", 1, 0.5), line("Killed"), scalar("actor/lr", 2, 0.25), finish(1)),
    "swanlab old": swanlab(_OLD, point("actor/lr", 1, 0.5), point("actor/grad_norm", 2, "INF"), version=1),
    "mlflow": _database(MLFLOW, [("actor/lr", 0.5, n, "a" * 32, n, 0) for n in range(3)]),
    "trackio": _database(TRACKIO, [(n, "one", n, '{"actor/grad_norm": "NaN", "actor/lr": 0.5}') for n in range(3)]),
}

TEXTS: dict[str, bytes] = {name: text.encode() for name, text in _TEXT.items()}
"""Samples that are text."""

SAMPLES: dict[str, bytes] = TEXTS | _BINARY
"""All samples."""

WITHOUT = frozenset({"died"})
"""Samples without a metric."""
