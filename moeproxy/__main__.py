"""Command line: `run` does the main job; `inspect`, `profile` and `prune` work on any supported checkpoint.

`read` shows and converts training logs, `triage` judges them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from moeproxy.errors import MoeproxyError

DEBUG = "MOEPROXY_DEBUG"
"""Environment variable that has the traceback of an unexpected error shown."""

Command = Callable[[argparse.Namespace], "str | tuple[str, int]"]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status.

    It is 1 after an error that the user can mend, 2 after one that nobody foresaw and 130 after Ctrl-C. `triage` has
    its own: 0 healthy, 1 alarm, 2 when it could not judge, an error included.
    """
    options = _parser().parse_args(arguments)
    judges = options.command == "triage"
    try:
        said = _command(options.command)(options)
    except MoeproxyError as error:
        _complain(str(error))
        return 2 if judges else 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except Exception as error:
        _complain(_unforeseen(error))
        return 2
    text, status = said if isinstance(said, tuple) else (said, 0)
    told = _tell(text)
    # An alarm is one even if nobody could read it.
    return status if told or status == 1 else 2 if judges else 1


def _tell(text: str) -> bool:
    """Write a result; return whether it could be written. A reader of a pipe that has seen enough is no failure."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up()
    except (OSError, ValueError, AttributeError) as error:  # a full disk, or no output at all
        _give_up()
        _complain(f"the result could not be written ({error})")
        return False
    return True


def _give_up() -> None:
    """Send what is left of the output to nowhere: Python would fail by it once more at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"moeproxy: {text}\n")


def _unforeseen(error: Exception) -> str:
    """Return an error that is a mistake of this program in one line, with its traceback where that is wanted."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if os.environ.get(DEBUG):
        return f"{said}\n{traceback.format_exc()}"
    return f"{said} (unexpected: set {DEBUG}=1 to see where, and please report it)"


def _command(name: str) -> Command:
    if name == "run":
        return _run
    from moeproxy import commands

    return getattr(commands, name)


def _run(options: argparse.Namespace) -> str:
    from tqdm.auto import tqdm

    with tqdm(total=100, unit="%", bar_format="{desc:<28}|{bar}| {n:3.0f} % {elapsed}") as bar:
        bar.set_description_str("starting")
        bar.refresh()
        from moeproxy.mainjob import run_main_job  # heavy imports come after the bar shows

        def show(stage: str, share: float) -> None:
            bar.set_description_str(stage)
            bar.update(max(0.0, 100 * share - bar.n))

        result = run_main_job(options.out, workers=options.workers, progress=show)
    lines = [
        f"{comparison.fault}: {proxy.model} {proxy.verdict}"
        for comparison in result.comparisons
        for proxy in comparison.proxies
        if "live" in proxy.sources
    ]
    return "\n".join([*lines, f"report: {result.report}"])


_CODES = (
    "Exit code: 0 healthy, 1 alarm, 2 could not judge. Could not judge is also a log that holds two runs, a metric "
    "that cannot be right where nothing else alarms, and any error."
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moeproxy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="the main job on the shipped testbed model, with a report")
    run.add_argument("--out", type=_path, default=Path("out"), help="directory for proxy and report (default: out)")
    run.add_argument("--workers", type=_positive, default=None, help="training processes at a time (default: cores)")
    inspect = commands.add_parser("inspect", help="what a checkpoint is and what its proxies would weigh")
    inspect.add_argument("checkpoint", type=_path)
    inspect.add_argument("--json", action="store_true", help="for programs: facts, possible counts, costs")
    inspect.add_argument("--expert-parallel", type=int, default=1, help="ranks the experts are spread over")
    profile = commands.add_parser("profile", help="run calibration texts through a model, save its routing")
    profile.add_argument("checkpoint", type=_path)
    profile.add_argument("texts", type=_path, help="one text a line, or a .jsonl file")
    profile.add_argument("--out", type=_path, required=True, help="profile to write (.npz)")
    profile.add_argument("--field", default="text", help="key of the text in a .jsonl file (default: text)")
    profile.add_argument("--batch-size", type=int, default=32)
    profile.add_argument("--max-tokens", type=_positive, default=None, help="cut texts to their first so many tokens")
    profile.add_argument("--device", default="cpu")
    profile.add_argument("--dtype", default="auto", help="dtype of the weights during the pass (default: as stored)")
    profile.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="hold one layer's weights at a time (default: when the model would not fit into memory)",
    )
    profile.add_argument("--scratch", type=_path, default=None, help="folder for hidden states of a streamed pass")
    _add_prune(commands.add_parser("prune", help="choose experts from a profile and write the proxy"))
    _add_read(commands.add_parser("read", help="what a training log of any framework holds; convert it"))
    judge = commands.add_parser("triage", help="did a run go wrong, from which step on, and why", epilog=_CODES)
    _add_triage(judge)
    return parser


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty path (a shell variable that is not set?)")
    # The shell leaves `~` alone after an equals sign and inside quotes.
    return Path(text).expanduser()


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _add_prune(prune: argparse.ArgumentParser) -> None:
    prune.add_argument("checkpoint", type=_path)
    prune.add_argument("--profile", type=_path, required=True, help="what `profile` wrote")
    prune.add_argument("--keep", type=int, required=True, help="experts to keep in every layer")
    prune.add_argument("--out", type=_path, required=True, help="new directory of the proxy")
    prune.add_argument("--method", default="cluster", help="cluster, merge, frequency, gate, reap, first, random")
    prune.add_argument(
        "--weights",
        type=float,
        nargs="+",
        default=(1, 1, 1),
        metavar="W",
        help="of the router, co-activation, context and, if four are given, output views (default: 1 1 1)",
    )
    prune.add_argument("--expert-parallel", type=int, default=1, help="ranks that must divide the count")
    prune.add_argument("--seed", type=int, default=0, help="of the random choice")
    prune.add_argument("--mtp", choices=("drop", "prune"), default=None, help="what to do with MTP heads, if any")
    prune.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="reload the proxy and compare logits (default: if original and proxy fit into memory)",
    )


def _add_triage(triage: argparse.ArgumentParser) -> None:
    triage.add_argument("log", type=_path, help="a log of any framework, or a trace written here")
    triage.add_argument(
        "--healthy",
        type=_path,
        nargs="+",
        default=(),
        metavar="LOG",
        help="logs of good runs of the same model and settings, six or more runs in all",
    )
    triage.add_argument("--json", action="store_true", help="for programs")
    _add_report(triage.add_argument_group("report", "one offline page with figures for print, to be sent around"))
    _add_mapping(triage)


def _add_report(report: argparse._ArgumentGroup) -> None:
    report.add_argument("--report", type=_path, default=None, metavar="DIR", help="write it into this folder")
    report.add_argument("--title", default="")
    report.add_argument("--authors", default="")
    report.add_argument("--notes", type=_path, default=None, metavar="FILE", help="what you have to say, a text file")
    report.add_argument(
        "--actions", type=_path, default=None, metavar="CSV", help="what you did: columns step, time, kind, text"
    )
    report.add_argument(
        "--with",
        dest="results",
        type=_path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="saved results that belong in it: reproductions, remedies, comparisons, a study, traces",
    )
    report.add_argument(
        "--images",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="SVG, PDF and PNG of every figure (about a second each; needs kaleido and Chromium)",
    )


def _add_read(read: argparse.ArgumentParser) -> None:
    read.add_argument("path", type=_path, help="a log, an archive of logs, or a directory")
    read.add_argument(
        "--to",
        choices=("parquet", "csv"),
        default=None,
        help="write each run as such files: NAME (signals), NAME.status (state of each cell: measured, missing, null, "
        "nan, ...), NAME.original (every key as it was logged) and NAME.original.status (states of those cells)",
    )
    read.add_argument("--out", type=_path, default=Path("traces"), help="directory to write to (default: traces)")
    _add_mapping(read)


def _add_mapping(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--map",
        type=_pair,
        nargs="+",
        default=(),
        metavar="KEY=SIGNAL",
        help="which signal a key of the log is, instead of the framework's own map",
    )
    parser.add_argument("--step", default=None, help="key that holds the step")
    parser.add_argument("--framework", default=None, help="who wrote the log (default: recognised by its keys)")


def _pair(text: str) -> tuple[str, str]:
    key, sign, signal = text.rpartition("=")
    if not sign or not key or not signal:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=SIGNAL")
    return key, signal


if __name__ == "__main__":
    raise SystemExit(main())
