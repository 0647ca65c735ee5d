"""What the command line does, thin over the library: every function takes parsed options and returns text."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeproxy.errors import MoeproxyError, TraceError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.cost import Cost, cost
from moeproxy.proxy.plan import allowed_counts, check_count

if TYPE_CHECKING:  # one imports torch, the other pandas
    from moeproxy.proxy.build import Proxy
    from moeproxy.triage.logs import LogVerdict


def inspect(options: Namespace) -> str:
    """Say what a checkpoint is and what each possible proxy would weigh, from its headers alone."""
    checkpoint = Checkpoint.open(options.checkpoint)
    counts = allowed_counts(checkpoint, expert_parallel=options.expert_parallel)
    costs = [cost(checkpoint), *(cost(checkpoint, count) for count in _shown(counts, checkpoint.n_experts))]
    if options.json:
        return json.dumps(_facts(checkpoint, counts) | {"costs": [asdict(item) for item in costs]}, indent=2)
    dense = checkpoint.n_layers - len(checkpoint.moe_layers)
    lines = [
        repr(checkpoint),
        f"router: {checkpoint.family.router_kind}",
        f"layers: {len(checkpoint.moe_layers)} with experts, {dense} without, "
        f"{len(checkpoint.extra_layers)} multi-token-prediction layers with experts",
        f"weights: {_gb(checkpoint.nbytes, checkpoint.nbytes)} GB in {len(checkpoint.shards)} files",
        f"counts a proxy can have: {_ranges(counts)}",
        "",
        *_cost_lines(costs),
    ]
    return "\n".join(lines)


def _facts(checkpoint: Checkpoint, counts: list[int]) -> dict[str, object]:
    return {
        "model": checkpoint.name,
        "model_type": checkpoint.family.model_type,
        "n_layers": checkpoint.n_layers,
        "moe_layers": checkpoint.moe_layers,
        "mtp_layers": checkpoint.extra_layers,
        "n_experts": checkpoint.n_experts,
        "top_k": checkpoint.top_k,
        "n_group": checkpoint.n_group,
        "topk_group": checkpoint.topk_group,
        "router": checkpoint.family.router_kind,
        "counts": counts,
        "fingerprint": checkpoint.fingerprint,
    }


def _shown(counts: list[int], n_experts: int) -> list[int]:
    """The possible counts nearest to 7/8, 3/4, 5/8, 1/2, 3/8, 1/4, 1/8 and 1/16 of the experts, descending."""
    smaller = [count for count in counts if count < n_experts]
    wished = [n_experts * share / 16 for share in (14, 12, 10, 8, 6, 4, 2, 1)]
    near = {min(smaller, key=lambda count, wish=wish: abs(count - wish)) for wish in wished if smaller}
    return sorted(near, reverse=True)


def _cost_lines(costs: list[Cost]) -> list[str]:
    """A table: what stays and what is cut, beginning with the original."""
    full = costs[0]
    lines = [f"{'':<10}{'experts cut':>12}{'parameters':>18}{'active':>18}{'GB':>10}{'cut':>8}"]
    for item in costs:
        name = "original" if item is full else f"proxy-{item.n_experts}"
        cut = f"{100 * (1 - item.params / full.params):.1f} %"
        lines.append(
            f"{name:<10}{full.n_experts - item.n_experts:>12}{item.params:>18,}{item.params_active:>18,}"
            f"{_gb(item.nbytes, full.nbytes):>10}{cut:>8}"
        )
    return lines


def _gb(nbytes: int, largest: int) -> str:
    return f"{nbytes / 1e9:,.{3 if largest < 1e10 else 1}f}"


def profile(options: Namespace) -> str:
    """Run calibration texts through a model and save how it routes them."""
    from tqdm.auto import tqdm

    from moeproxy.experts.profile import profile as run_profile

    texts = read_texts(options.texts, options.field)
    _check_new_profile(options.out)
    with tqdm(total=len(texts), desc="profile", unit="text") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total  # a streamed pass counts every text once a layer
            bar.update(done - bar.n)

        result = run_profile(
            options.checkpoint,
            texts,
            batch_size=options.batch_size,
            device=options.device,
            dtype=options.dtype,
            stream=options.stream,
            scratch=options.scratch,
            max_tokens=options.max_tokens,
            progress=show,
        )
    return f"{result!r}\nprofile: {result.save(options.out)}"


def _check_new_profile(out: Path) -> None:
    """Refuse, before the pass, a place that the profile could not be saved to or that would be overwritten."""
    if out.suffix != ".npz":
        raise MoeproxyError("a profile is saved as .npz", where=out, remedy=f"name the file {out.stem}.npz")
    if out.exists():
        raise MoeproxyError("the file exists already", where=out, remedy="choose another name, or remove it yourself")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise MoeproxyError("the profile could not be saved there", where=out, expected="a folder you may write to")


def prune(options: Namespace) -> str:
    """Choose experts from a saved profile, write the proxy, and check it by reload if both fit into memory."""
    from tqdm.auto import tqdm

    from moeproxy.experts.belongs import check_profile
    from moeproxy.experts.statistics import ExpertProfile
    from moeproxy.experts.stream_memory import should_stream
    from moeproxy.proxy.build import build
    from moeproxy.proxy.cluster import select
    from moeproxy.proxy.damage import damage

    checkpoint = Checkpoint.open(options.checkpoint)
    statistics = ExpertProfile.load(options.profile)
    check_profile(statistics, checkpoint)
    check_count(statistics, options.keep, expert_parallel=options.expert_parallel)
    plan = select(statistics, options.keep, method=options.method, weights=tuple(options.weights), seed=options.seed)
    lost = damage(statistics, plan).gate_lost_L
    with tqdm(total=1, desc="write", unit="B", unit_scale=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        proxy = build(checkpoint, plan, options.out, mtp=options.mtp, progress=show)
    lines = [f"routed gate mass that loses its expert: {lost.mean():.1%} (mean over layers; worst {lost.max():.1%})"]
    if options.check is None and should_stream(checkpoint, "float32", "cpu"):
        lines.append("not checked: original and proxy do not fit into memory together; --check loads them anyway")
    elif options.check is not False:
        proxy = _checked(proxy)
    return "\n".join([repr(proxy), *lines])


def _checked(proxy: Proxy) -> Proxy:
    """The proxy with its check; one that fails, or is interrupted, is removed, so that nobody takes it for sound."""
    from moeproxy.proxy.build import check

    try:
        return check(proxy)
    except BaseException:
        shutil.rmtree(proxy.path, ignore_errors=True)
        raise


def _mapping(options: Namespace) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for key, signal in options.map:
        if found.setdefault(key, signal) != signal:
            raise TraceError(f"--map gives {key!r} two signals ({found[key]}, {signal})", expected="one")
    return found or None


def read(options: Namespace) -> str:
    """Say what a log holds, or convert it."""
    from moeproxy.traces.converting import convert
    from moeproxy.traces.reading import read as read_log

    logs = read_log(options.path, mapping=_mapping(options), step=options.step, framework=options.framework)
    lines = [log.summary() for log in logs]
    if options.to:
        lines += [f"written: {path}" for path in convert(logs, options.to, options.out)]
    return "\n".join(lines)


def triage(options: Namespace) -> tuple[str, int]:
    """Judge the runs of a log; return the verdicts and the exit code for scripts.

    A report that cannot be written takes no verdict away; the code is then 1 for an alarm, else 2.
    """
    from moeproxy.triage.logs import exit_code, judge_log

    judged: list[LogVerdict] = []
    reading = {"mapping": _mapping(options), "step": options.step, "framework": options.framework}
    page = failure = None
    if options.report is None:
        _check_no_words(options)
    else:
        try:
            judged, page = _reported(options, reading)
        except Exception as error:  # the verdict does not depend on what becomes of the report
            failure = error
    if page is None:
        judged = judge_log(options.log, options.healthy, **reading)
    text = "\n".join(one.text() for one in judged) or f"{options.log}: no run"
    if options.json:
        text = json.dumps([one.to_dict() for one in judged], indent=2)
    elif page is not None:
        text += f"\nreport: {page}"
    code = exit_code(judged)
    if failure is None:
        return text, code
    said = failure if isinstance(failure, MoeproxyError) else f"{type(failure).__name__}: {failure}"
    sys.stderr.write(f"moeproxy: the report was not written: {said}\n")
    return text, code or 2


def _check_no_words(options: Namespace) -> None:
    given = [name for name in ("title", "authors", "notes", "actions", "results") if getattr(options, name)]
    if given:
        said = ", ".join("--with" if name == "results" else f"--{name}" for name in given)
        raise MoeproxyError(f"{said} without --report", remedy="name the folder of the report, --report DIR")


def _reported(options: Namespace, reading: dict[str, Any]) -> tuple[list[LogVerdict], Path]:
    """Judge the runs of a log and write the report."""
    from moeproxy.triage.logs import verdict_of
    from moeproxy.view.actions import read_actions
    from moeproxy.view.gather import Words, postmortem
    from moeproxy.view.report import check_place, compose, write_document

    check_place(options.report)
    notes = () if options.notes is None else (_read_notes(options.notes),)
    actions = () if options.actions is None else read_actions(options.actions)
    words = Words(options.title, options.authors, notes, actions)
    found = postmortem(options.log, options.healthy, words=words, results=options.results, **reading)
    page = write_document(compose(found), options.report, images=options.images)
    return [verdict_of(options.log, one.name, one.run, one.judgements) for one in found.incidents], page


def _read_notes(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MoeproxyError(f"notes cannot be read ({error})", where=path, expected="a text file in UTF-8") from error


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
        if not isinstance(value, str):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        raise MoeproxyError(
            f"line {number} has no text under {field!r}",
            where=path,
            expected="a JSON object",
            remedy="name the key with --field",
        ) from error
    return value


def _ranges(values: list[int]) -> str:
    """Return 4-7, 9 for [4, 5, 6, 7, 9], and every value of an even grid with its step."""
    steps = {b - a for a, b in itertools.pairwise(values)}
    if len(values) > 3 and len(steps) == 1:
        step = steps.pop()
        return f"{values[0]}-{values[-1]}" + (f" in steps of {step}" if step > 1 else "")
    return ", ".join(map(str, values)) or "none"
