"""Read anybody's log: a file, a directory or an archive becomes one LogTrace a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from moeproxy.errors import TraceError
from moeproxy.files import printable
from moeproxy.traces.keys import FRAMEWORKS
from moeproxy.traces.logs import filestore
from moeproxy.traces.logs.assemble import Wishes, assembled
from moeproxy.traces.logs.dispatch import UnknownKindError, fill, kind_of
from moeproxy.traces.logs.opening import HostileError, Limits, Source, sources
from moeproxy.traces.logs.rows import RowStore
from moeproxy.traces.logs.sink import Run, Sink
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.readers import rft_logs
from moeproxy.traces.readers.rft_faultbench import STEP_FILE, TRAJECTORY_FILE

MAX_FILES = 20_000
_NO_LOGS = frozenset(
    {
        "added_tokens.json",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "debug-internal.log",
        "swanlab-metadata.json",
        "wandb-metadata.json",
        "wandb-summary.json",
    }
)
"""Files of a checkpoint, and of trackers about themselves, which lie beside logs and are none."""
_LOGLIKE = re.compile(
    r"(?:\.(?:log|txt|out|err|stdout|stderr|json|jsonl|ndjson|csv|tsv|md|db|sqlite|wandb|swanlab|gz|zst|bz2|xz|zip|tar|tgz)(?:\.\d+)?$)"
    r"|tfevents|(?:^|[-_.])(?:log|stdout|stderr|nohup|slurm)(?:$|[-_.])",
    re.IGNORECASE,
)


def read(
    path: str | Path,
    *,
    mapping: Mapping[str, str] | None = None,
    step: str | None = None,
    framework: str | None = None,
    limits: Limits | None = None,
) -> tuple[LogTrace, ...]:
    """Read every run of a log.

    Recognised are JSON lines, console output (JSON or Python dicts, verl's and Megatron's lines, with colours, process
    prefixes and progress bars), CSV (wandb exports too), trainer_state.json, Megatron's golden values, JSON lists,
    TensorBoard event files, binary files of wandb and SwanLab, databases of mlflow and trackio, and gzip, zstd, bzip2,
    xz, tar and zip archives of these; text, CSV and JSON in fences of Markdown; as directories, mlflow's file store and
    runs of RFT-FaultBench too.

    Args:
        path: a file, or a directory that is searched for logs.
        mapping: signal of each original key, instead of the framework's own map; see `suggest`.
        step: key that holds the step.
        framework: name in `moeproxy.traces.keys.FRAMEWORKS`, when it is not to be recognised.
        limits: of archives.

    Returns:
        One LogTrace a run, in the order of files and of runs within them. A log without a metric is among them, with
        `has_metrics` False; its `trace` raises an error that says what the log contains.

    Raises:
        TraceError: there is no log, or the file is broken or hostile. In a directory such a file becomes a LogTrace
            without metrics that says what is wrong with it; likewise a broken file among others in an archive.

    Example:
        >>> log, = read("trainer_state.json")
        >>> log.trace.values("grad_norm"), log.counts("total_loss")
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise TraceError(f"unknown framework {framework!r}", expected=f"one of {', '.join(FRAMEWORKS)}")
    root, wishes = Path(path), Wishes(mapping, step, framework)
    if not root.exists():
        raise TraceError("no such file or directory", where=root, expected="a log or a directory of logs")
    if not root.is_dir():
        if not root.is_file():
            # A pipe or a device may have no end.
            raise TraceError("neither a file nor a directory", where=root, expected="a log or a directory of logs")
        return tuple(_chosen(_read(root, wishes, limits, alone=True), root))
    found, taken = _stores(root, wishes)
    found += [log for files in _groups(root, taken) for log in _group(files, root, wishes, limits)]
    return tuple(_chosen(found, root))


def _stores(root: Path, wishes: Wishes) -> tuple[list[LogTrace], list[Path]]:
    """Read the runs that are folders rather than files; return them and the folders whose files are done with."""
    found, taken = [], []
    for folder in filestore.runs_below(root):
        sink = Sink()
        taken.append(folder)
        try:
            name = filestore.read_run(folder, sink)
            found += logs_of(name, sink, (str(folder / filestore.METRICS),), wishes)
        except TraceError as error:
            found.append(_unreadable(str(folder), error, wishes))
    if wishes == Wishes():
        for folder, row in rft_logs.folders_below(root).items():
            taken += [file.parent for file in folder.rglob(STEP_FILE)]
            try:
                found.append(rft_logs.read_folder(folder, row))
            except TraceError as error:
                found.append(_unreadable(str(folder), error, wishes))
    return found, taken


def _read(path: Path, wishes: Wishes, limits: Limits | None, *, alone: bool, every: bool = False) -> list[LogTrace]:
    """Read a file, or the members of an archive as the files of a directory are read.

    Raises:
        TraceError: it is broken or hostile, or none of its members can be read.
    """
    found: list[LogTrace] = []
    errors: list[TraceError] = []
    n_members = n_read = n_hidden = 0
    for source in sources(path, limits):
        if not every and _is_hidden(source.name[len(str(path)) :]):
            n_hidden += 1
            continue
        n_members += 1
        try:
            logs = _file(source, wishes, alone=alone)
        except HostileError:
            raise
        except TraceError as error:
            errors.append(error)
            logs = [] if isinstance(error, UnknownKindError) else [_unreadable(source.name, error, wishes)]
        else:
            n_read += bool(logs)
        found += logs
    if errors and not n_read:
        raise errors[0]
    if n_hidden and not n_members:
        return _read(path, wishes, limits, alone=alone, every=True)  # there is nothing else in it
    return found if n_members == 1 else [log for log in found if _says_something(log)] or found


def _is_hidden(member: str) -> bool:
    """Whether a member of an archive ("!folder/name") is one of the files that are no logs in a directory either."""
    parts = PurePosixPath(member.replace("!", "/").lstrip("/")).parts
    return any(part.startswith(".") for part in parts) or bool(parts and parts[-1] in _NO_LOGS)


def _file(source: Source, wishes: Wishes, *, alone: bool) -> list[LogTrace]:
    """Read one file; without a run in it, one LogTrace says what it contains."""
    sink = Sink()
    kind = kind_of(source)
    if kind == "unknown" and not alone:
        return []
    fill(source, kind, sink)
    return logs_of(stem(source.name), sink, (source.name,), wishes)


def logs_of(name: str, sink: Sink, files: tuple[str, ...], wishes: Wishes) -> list[LogTrace]:
    """Return the runs of a filled sink; one without metrics when it has none."""
    runs = list(sink.runs.values()) or [Run("")]
    shown = tuple(map(printable, files))
    named = [(printable(run.name or name), run.store.finish()) for run in runs]
    return [log for called, rows in named for log in assembled(called, rows, sink, shown, wishes)]


def _groups(root: Path, taken: list[Path]) -> Iterator[list[Path]]:
    """Yield the files of a directory that may be logs; event files of one folder belong to one run."""
    found = []
    for file in sorted(root.rglob("*")):
        hidden = file.name in _NO_LOGS or any(part.startswith(".") for part in file.relative_to(root).parts)
        if hidden or not _LOGLIKE.search(file.name) or _is_done(file, taken):
            continue
        if file.is_file() and not file.is_symlink():
            found.append(file)
        if len(found) > MAX_FILES:
            raise TraceError(f"more than {MAX_FILES:,} files", where=root, expected="the directory of a run or a few")
    events = [file for file in found if "tfevents" in file.name]
    folders = sorted({file.parent for file in events})
    yield from ([file for file in events if file.parent == folder] for folder in folders)
    yield from ([file] for file in found if "tfevents" not in file.name)


def _is_done(file: Path, taken: list[Path]) -> bool:
    """Whether a file belongs to a run that is read elsewhere: a folder of `_stores`, or SwanLab's copies of points."""
    if file.name in (STEP_FILE, TRAJECTORY_FILE):
        return file.parent in taken
    if any(folder / filestore.METRICS in file.parents for folder in taken):
        return True
    points = file.parent.parent
    return points.name == "logs" and file.parent.name.isdigit() and any(points.parent.glob("*.swanlab"))


def _group(files: list[Path], root: Path, wishes: Wishes, limits: Limits | None) -> list[LogTrace]:
    if len(files) == 1:
        try:
            found = _read(files[0], wishes, limits, alone=False)
        except TraceError as error:
            return [_unreadable(str(files[0]), error, wishes)]
        return [log for log in found if _says_something(log)]
    try:
        return _events(files, root, wishes, limits)
    except TraceError as error:
        return [_unreadable(str(files[0]), error, wishes)]


def _says_something(log: LogTrace) -> bool:
    """Whether a file of a directory is a log: text and JSON without rows, failures and progress are something else."""
    info = log.info
    other = info.container not in ("console log", "JSON lines", "JSON document", "CSV")
    return bool(info.rows or info.findings or info.progress or other)


def _unreadable(file: str, error: TraceError, wishes: Wishes) -> LogTrace:
    """One file of a directory or an archive that is broken must not hide the others."""
    sink = Sink(container="unreadable")
    sink.find("unreadable", 0, str(error))
    (log,) = logs_of(stem(file), sink, (file,), wishes)
    return log


def _events(files: list[Path], root: Path, wishes: Wishes, limits: Limits | None) -> list[LogTrace]:
    """Read the event files of one folder as one run, in the order of their names, which hold the time."""
    whole, names, store = Sink(), [], RowStore()
    for file in files:
        for source in sources(file, limits):
            store.file = len(names)
            names.append(source.name)
            whole.runs = {"": Run("", store)}
            fill(source, kind_of(source), whole)
    folder = files[0].parent
    return logs_of(str(folder.relative_to(root)) if folder != root else folder.name, whole, tuple(names), wishes)


def _chosen(found: list[LogTrace], root: Path) -> list[LogTrace]:
    if not found:
        raise TraceError(
            "no log in it",
            where=root,
            expected="JSON lines, console output, CSV, trainer_state.json, event files, or archives of these",
            remedy="name the file itself, if its name does not look like a log",
        )
    return found


def stem(name: str) -> str:
    """Return the name of a run after its file: without folder, archive and the usual endings."""
    last = Path(name.rpartition("!")[2]).name
    stem = re.sub(r"\.(?:db|sqlite|wandb|swanlab|gz|zst|bz2|xz|tar|tgz|zip)$", "", last)
    return (
        stem if "tfevents" in stem else re.sub(r"\.(?:log|txt|out|json|jsonl|csv|tsv|md|wandb|db)$", "", stem) or last
    )
