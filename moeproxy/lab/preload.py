"""What the fork server of `processes` imports once, so that each run forks from it instead of importing torch anew.

Importing starts no thread of torch or OpenMP and touches no GPU: a process may be forked from here.
"""

from __future__ import annotations

import contextlib
import gc
import signal

from moeproxy.lab.worker import set_environment

set_environment(threads=1)
# Ctrl-C is for the program that sweeps; the fork server ignores it too, once it serves.
_before = signal.signal(signal.SIGINT, signal.SIG_IGN)
# A broken installation is reported by the run that needs it; an error here would only say that the server is gone.
with contextlib.suppress(Exception):
    import moeproxy.lab.run  # noqa: F401
signal.signal(signal.SIGINT, _before)
gc.collect()
gc.freeze()  # what is loaded stays shared with the children and out of the collections that accelerate asks for
