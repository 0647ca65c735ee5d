"""Calls from many threads at once, as JupyterLab makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(action: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=action, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
