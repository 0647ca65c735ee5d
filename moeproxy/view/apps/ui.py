"""Thread-correct parts for ipywidgets panels.

JupyterLab 4.6 runs a widget's callbacks on the main thread or on a subshell thread with an event loop of its
own, at the same time as a running cell; nbclient and older servers run all of them on the main thread. So
nothing here captures an event loop, every shared object has one lock, and what is shown changes through
widget traits, which any thread may set. What two widgets say may come on either thread, and so in another
order than it was said: `Press` and `Job` act a moment after their button is pressed. An `Output` widget as
context manager would catch the output of other cells, and an exception in a callback is shown nowhere by
JupyterLab: `Status.guard` shows it.
"""

from __future__ import annotations

import functools
import html
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import ipywidgets as widgets

Report = Callable[[float, str], None]
JobState = Literal["idle", "running", "done", "cancelled", "failed"]
_SECONDS_BETWEEN_REPORTS = 0.1
_ON_THE_WAY_S = 0.25


class Cancelled(BaseException):
    """The user cancelled a job; no `except Exception` on the way may take it for a failure."""


class Debouncer:
    """Run `action` once, with the latest arguments, after calls have stopped for `wait_s` seconds.

    The timer is a thread: an asyncio timer would belong to whichever loop the first event came on.
    Two actions never overlap.
    """

    def __init__(self, action: Callable[..., None], wait_s: float = 0.15) -> None:
        self._action, self._wait_s = action, wait_s
        self._pending = threading.Lock()
        self._acting = threading.Lock()
        self._timer: threading.Timer | None = None
        self.calls = 0
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        timer = threading.Timer(self._wait_s, self._fire, (args, kwargs))
        timer.daemon = True
        with self._pending:
            self.calls += 1
            if self._timer is not None:
                self._timer.cancel()
            self._timer = timer
            timer.start()

    def _fire(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._acting:
            self.runs += 1
            self._action(*args, **kwargs)

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the latest call has been acted upon; return whether it has."""
        with self._pending:
            timer = self._timer
        if timer is None:
            return True
        timer.join(timeout_s)
        return not timer.is_alive()


class Status:
    """One line that sighted users see and screen readers announce."""

    def __init__(self, text: str = "Ready.") -> None:
        self.widget = widgets.HTML()
        self.text = ""
        self.is_error = False
        self.say(text)

    def say(self, text: str, *, error: bool = False) -> None:
        """Show `text`, escaped; an error is told by its words and a sign, not by colour alone."""
        self.text, self.is_error = text, error
        colour = "var(--jp-error-color0, #a40000)" if error else "inherit"
        words = ("⚠ " if error else "") + html.escape(text)
        style = f"color:{colour};line-height:1.4"
        self.widget.value = f"<div role='status' aria-live='polite' style='{style}'>{words}</div>"

    def show(self, error: BaseException) -> None:
        """Show an exception by type and message."""
        self.say(f"{type(error).__name__}: {error}", error=True)

    def guard(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Return `callback` with its exceptions shown here instead of lost."""

        @functools.wraps(callback)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return callback(*args, **kwargs)
            except Exception as error:
                self.show(error)
                return None

        return guarded


class Redraw(Debouncer):
    """Draw once changes have stopped; an error stays in the status line until the next change.

    The drawing itself clears no error but its own: a refusal is often shown while the change before it still waits
    to be drawn.
    """

    def __init__(self, draw: Callable[[], None], status: Status) -> None:
        super().__init__(self._act)
        self._draw, self._status, self._failure = draw, status, ""

    def __call__(self) -> None:
        self._clear(self._status.text)  # an error shown now is about what was there before this change
        super().__call__()

    def _act(self) -> None:
        try:
            self._draw()
        except Exception as error:
            self._status.show(error)
            self._failure = self._status.text
        else:
            # A drawing that was under way at the change may have failed after the line was cleared.
            self._clear(self._failure)
            self._failure = ""

    def _clear(self, text: str) -> None:
        if self._status.is_error and self._status.text == text:
            self._status.say("Ready.")


class Press(Debouncer):
    """Acts a moment after a button is pressed, by when what was typed just before has arrived, too.

    In JupyterLab 4.6 the click came first in 6 of about 40 cases where it followed the text at once.

    Args:
        button: the button.
        action: called without arguments, in a thread of its own.
        status: told when that fails.
    """

    def __init__(self, button: widgets.Button, action: Callable[[], None], status: Status) -> None:
        super().__init__(status.guard(action), _ON_THE_WAY_S)
        button.on_click(lambda _: self())


class TimeLeft:
    """Says how much is done and how long the rest will take at the pace so far.

    Args:
        unit: what is counted.
        scale: by what counts are multiplied before they are shown (1e-6: bytes as MB).
    """

    def __init__(self, unit: str, scale: float = 1.0) -> None:
        self._unit, self._scale, self._start_s = unit, scale, time.monotonic()

    def __call__(self, done: int, total: int) -> str:
        digits = 0 if self._scale == 1.0 else 1
        text = f"{done * self._scale:,.{digits}f} of {total * self._scale:,.{digits}f} {self._unit}"
        if not 0 < done < total:
            return text
        left_s = (time.monotonic() - self._start_s) * (total - done) / done
        return f"{text}, {f'{left_s / 60:.0f} min' if left_s > 90 else f'{left_s:.0f} s'} left"


class Job:
    """Work in a background thread, with a start and a cancel button, progress and a status line.

    Args:
        work: called with `report(fraction, text)`, which it calls between its steps; `report` raises
            `Cancelled` once the user asked for it, so that clean-up code of the work runs as usual.
        label: what the start button says.
        cancel: what the cancel button says; two jobs of one panel need different names.
        status: where progress, result and errors are told; its own line when not given.
        on_done: called with the result in the worker thread.
        cancelled: said after a cancellation.
    """

    def __init__(
        self,
        work: Callable[[Report], Any],
        label: str,
        *,
        cancel: str = "Cancel",
        status: Status | None = None,
        on_done: Callable[[Any], None] | None = None,
        cancelled: str = "cancelled, nothing was kept.",
    ) -> None:
        self._work, self._on_done, self._cancelled = work, on_done, cancelled
        self.status = status or Status()
        whole = {"width": "auto", "flex": "0 0 auto"}  # in a narrow cell buttons go to the next line, not cut off
        self.start_button = widgets.Button(description=label, layout=widgets.Layout(**whole))
        self.cancel_button = widgets.Button(description=cancel, disabled=True, layout=widgets.Layout(**whole))
        self.bar = widgets.FloatProgress(value=0.0, max=1.0, description="0 %", style={"description_width": "48px"})
        self.bar.layout.width = "220px"
        wrapping = widgets.Layout(flex_flow="row wrap")
        self.widget = widgets.Box([self.start_button, self.cancel_button, self.bar], layout=wrapping)
        self.state: JobState = "idle"
        self.result: Any = None
        self._lock = threading.Lock()
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_report_s = 0.0
        self.start_button.on_click(lambda _: self.start(_ON_THE_WAY_S))
        self.cancel_button.on_click(lambda _: self.cancel())

    def start(self, wait_s: float = 0.0) -> bool:
        """Start the work unless it is running; return whether it was started.

        Args:
            wait_s: how long to wait before, as after a click, for what the controls were told.
        """
        with self._lock:
            if self.state == "running":
                return False
            self.state, self.result = "running", None
            self._cancel.clear()
            self._thread = threading.Thread(target=self._run, args=(wait_s,), daemon=True)
            self._thread.name = self.start_button.description
        self._enable(running=True)
        self._draw(0.0)
        self._thread.start()
        return True

    def cancel(self) -> None:
        """Ask the work to stop at its next report."""
        self._cancel.set()

    def join(self, timeout_s: float | None = None) -> JobState:
        """Wait for the work; return the state reached."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.state

    def _run(self, wait_s: float) -> None:
        try:
            if self._cancel.wait(wait_s):
                raise Cancelled
            result = self._work(self._report)
            self._finish("done", result)
        except Cancelled:
            self._finish("cancelled")
            self.status.say(f"{self.start_button.description}: {self._cancelled}")
        except Exception as error:
            self._finish("failed")
            self.status.show(error)

    def _finish(self, state: JobState, result: Any = None) -> None:
        if state == "done":
            self._draw(1.0)
            if self._on_done is not None:
                self._on_done(result)
        with self._lock:
            self.state, self.result = state, result
        self._enable(running=False)

    def _report(self, fraction: float, text: str = "") -> None:
        if self._cancel.is_set():
            raise Cancelled
        now_s = time.monotonic()
        # Ten messages a second are enough to look smooth, and few enough not to flood the connection.
        if now_s - self._last_report_s >= _SECONDS_BETWEEN_REPORTS:
            self._last_report_s = now_s
            self._draw(fraction)
            if text:
                self.status.say(text)

    def _draw(self, fraction: float) -> None:
        self.bar.value = min(max(fraction, 0.0), 1.0)
        self.bar.description = f"{self.bar.value:.0%}".replace("%", " %")

    def _enable(self, *, running: bool) -> None:
        self.start_button.disabled = running
        self.cancel_button.disabled = not running
