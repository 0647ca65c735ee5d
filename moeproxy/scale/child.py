"""What happens in the process of an emulation. Imports torch only there."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeproxy.errors import MoeproxyError, ScaleError
from moeproxy.lab.worker import set_environment, settle


def main(
    task: str, request: Mapping[str, Any], log: Path, environment: Mapping[str, str], connection: Connection
) -> None:
    """Do a task and send (error, result) to the parent; one of the two is None.

    Args:
        task: "emulate", "peaks", "real" or "replay".
        request: its arguments.
        log: file that takes all this process writes.
        environment: of the parent.
        connection: takes the answer.
    """
    settle(log, environment, connection)
    set_environment(threads=1)
    try:
        connection.send((None, _done(task, request)))
    except MoeproxyError as error:
        connection.send((error, None))
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__} in {os.path.basename(last.filename)}, line {last.lineno}: {error}"
        connection.send((ScaleError(found, where=task), None))
    os._exit(0)  # a process group that was never left writes warnings at the ordinary end


def _done(task: str, request: Mapping[str, Any]) -> Any:
    from moeproxy.scale import probing, tasks  # here: torch reads the environment when it is imported

    known = {"emulate": tasks.emulate, "peaks": probing.peaks, "real": tasks.real, "replay": tasks.replay}
    return known[task](**request)
