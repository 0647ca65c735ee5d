"""What the command line does, thin over the library: every function takes parsed options and returns text."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from pathlib import Path

from moeproxy.errors import MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.cost import cost_table
from moeproxy.proxy.plan import allowed_counts


def inspect(options: Namespace) -> str:
    """Say what a checkpoint is and what each possible proxy would weigh, from its headers alone."""
    checkpoint = Checkpoint.open(options.checkpoint.expanduser())
    counts = allowed_counts(checkpoint, expert_parallel=options.expert_parallel)
    smaller = [count for count in counts if count < checkpoint.n_experts]
    lines = [repr(checkpoint), f"possible counts: {_ranges(counts)}"]
    if smaller:
        table = cost_table(checkpoint, _spread(smaller, 8)[::-1])
        shown = table.loc[:, ["model", "params", "params_active"]]
        shown["GB"] = (table["nbytes"] / 1e9).round(3)
        shown["% of params"] = (100 * table["share"]).round(1)
        lines.append(shown.to_string(index=False))
    return "\n".join(lines)


def profile(options: Namespace) -> str:
    """Run calibration texts through a model and save how it routes them."""
    from tqdm.auto import tqdm

    from moeproxy.experts.profile import profile as run_profile

    texts = read_texts(options.texts.expanduser(), options.field)
    with tqdm(total=len(texts), desc="profile", unit="text") as bar:

        def show(done: int, _total: int) -> None:
            bar.update(done - bar.n)

        result = run_profile(
            options.checkpoint.expanduser(),
            texts,
            batch_size=options.batch_size,
            device=options.device,
            dtype=options.dtype,
            progress=show,
        )
    return f"{result!r}\nprofile: {result.save(options.out)}"


def prune(options: Namespace) -> str:
    """Choose experts from a saved profile, write the proxy, and check it by reload unless told not to."""
    from tqdm.auto import tqdm

    from moeproxy.experts.statistics import ExpertProfile
    from moeproxy.proxy.build import build, check
    from moeproxy.proxy.cluster import select

    checkpoint = Checkpoint.open(options.checkpoint.expanduser())
    statistics = ExpertProfile.load(options.profile.expanduser())
    plan = select(statistics, options.keep, method=options.method, weights=tuple(options.weights), seed=options.seed)
    with tqdm(total=1, desc="write", unit="B", unit_scale=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        proxy = build(checkpoint, plan, options.out.expanduser(), mtp=options.mtp, progress=show)
    return repr(proxy if options.no_check else check(proxy))


def read_texts(path: Path, field: str) -> list[str]:
    """Return calibration texts: one a line, or the `field` of each line of a .jsonl file.

    Raises:
        MoeproxyError: the file cannot be read, holds no text, or a line lacks the field.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise MoeproxyError(
            f"calibration texts cannot be read ({error})", where=path, expected="UTF-8 text, one a line, or JSON lines"
        ) from error
    if path.suffix == ".jsonl":
        lines = [_field(line, number, path, field) for number, line in enumerate(lines, 1)]
    if not lines:
        raise MoeproxyError("no calibration text", where=path, remedy="name a file with one text a line")
    return lines


def _field(line: str, number: int, path: Path, field: str) -> str:
    try:
        value = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise MoeproxyError(
            f"line {number} has no {field!r}", where=path, expected="a JSON object", remedy="name the key with --field"
        ) from error
    return str(value)


def _spread(values: list[int], n: int) -> list[int]:
    """Return at most `n` of `values`, evenly spread, the first and the last among them."""
    if len(values) <= n:
        return values
    return [values[round(i * (len(values) - 1) / (n - 1))] for i in range(n)]


def _ranges(values: list[int]) -> str:
    """Return 4-7, 9 for [4, 5, 6, 7, 9], and every value of an even grid with its step."""
    steps = {b - a for a, b in itertools.pairwise(values)}
    if len(values) > 3 and len(steps) == 1:
        step = steps.pop()
        return f"{values[0]}-{values[-1]}" + (f" in steps of {step}" if step > 1 else "")
    return ", ".join(map(str, values)) or "none"
