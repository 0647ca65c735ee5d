"""A JupyterLab server on the loopback interface whose whole state lives in a throw-away directory."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_TIMEOUT_S = 120


@dataclass(frozen=True)
class LabServer:
    """Where a running server is and the token that it asks for."""

    base: str
    token: str
    root: Path

    def page(self, path: str) -> str:
        """Address of a notebook opened alone; `reset` forgets the layout of an earlier visit."""
        return f"{self.base}/lab/tree/{path}?token={self.token}&reset"

    def ask(self, path: str, method: str = "GET") -> Any:
        """Call the server's REST interface."""
        request = urllib.request.Request(f"{self.base}/api/{path}?token={self.token}", method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def stop_kernels(self) -> None:
        """End all sessions, so that one test's kernel does not slow the next."""
        for session in self.ask("sessions"):
            self.ask(f"sessions/{session['id']}", "DELETE")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(home: Path, extra: dict[str, str]) -> dict[str, str]:
    own = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    lab = {f"JUPYTERLAB_{name}_DIR": str(home / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    return {**os.environ, **own, **lab, "IPYTHONDIR": str(home / "ipython"), **extra}


def _silence_first_visit(home: Path) -> None:
    """A new user is asked about news, which would cover the notebook."""
    folder = home / "settings" / "@jupyterlab" / "apputils-extension"
    folder.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}
    (folder / "notification.jupyterlab-settings").write_text(json.dumps(quiet), encoding="utf-8")


def _command(port: int, token: str, root: Path) -> list[str]:
    options = {
        "--ip": "127.0.0.1",
        "--port": port,
        "--ServerApp.port_retries": 0,
        "--IdentityProvider.token": token,
        "--ServerApp.root_dir": root,
        "--ServerApp.open_browser": False,
        "--ServerApp.terminals_enabled": False,
        "--LabApp.news_url": "",
        "--LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "--LabApp.expose_app_in_browser": True,  # the tests ask the application itself whether it is ready
    }
    flags = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *flags]


def _wait_until_up(server: LabServer, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            server.ask("status")
        except OSError as error:
            if process.poll() is not None or time.monotonic() > give_up_s:
                tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise RuntimeError(f"JupyterLab did not come up:\n{tail}") from error
            time.sleep(0.2)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)  # kernels are in the same group
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def lab_server(root: Path, home: Path, **extra: str) -> Iterator[LabServer]:
    """Serve `root` until the block ends; settings, workspaces and logs go to `home`."""
    _silence_first_visit(home)
    port, token = _free_port(), secrets.token_hex(16)
    server, log = LabServer(f"http://127.0.0.1:{port}", token, root), home / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            _command(port, token, root),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=_environment(home, extra),
            start_new_session=True,
        )
        try:
            _wait_until_up(server, process, log)
            yield server
        finally:
            _stop(process)
