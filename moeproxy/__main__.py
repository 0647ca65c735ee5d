"""Command line: `python -m moeproxy run` does the main job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moeproxy.errors import MoeproxyError


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status (1 after an error that the user can mend)."""
    parser = argparse.ArgumentParser(prog="moeproxy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="the main job on the shipped testbed model, with a report")
    run.add_argument("--out", type=Path, default=Path("out"), help="directory for proxy and report (default: out)")
    run.add_argument("--workers", type=int, default=None, help="training processes at a time (default: cores)")
    options = parser.parse_args(arguments)
    try:
        _run(options.out, options.workers)
    except MoeproxyError as error:
        sys.stderr.write(f"moeproxy: {error}\n")
        return 1
    return 0


def _run(out: Path, workers: int | None) -> None:
    from tqdm.auto import tqdm

    with tqdm(total=100, unit="%", bar_format="{desc:<28}|{bar}| {n:3.0f} % {elapsed}") as bar:
        bar.set_description_str("starting")
        bar.refresh()
        from moeproxy.mainjob import run_main_job  # heavy imports come after the bar shows

        def show(stage: str, share: float) -> None:
            bar.set_description_str(stage)
            bar.update(max(0.0, 100 * share - bar.n))

        result = run_main_job(out, workers=workers, progress=show)
    for comparison in result.comparisons:
        for proxy in comparison.proxies:
            if "live" in proxy.sources:
                sys.stdout.write(f"{comparison.fault}: {proxy.model} {proxy.verdict}\n")
    sys.stdout.write(f"report: {result.report}\n")


if __name__ == "__main__":
    raise SystemExit(main())
