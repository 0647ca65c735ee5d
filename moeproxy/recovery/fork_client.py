"""The program with which Ray starts a worker, instead of its own `setup_worker.py`: it asks the template for a copy.

    python fork_client.py WORKER ARGUMENT...

The variable `MOEPROXY_TEMPLATE` says where the template is, and the number of the process that owns it. Where no
template answers, Ray's own program goes on. It needs the standard library only, and is there for milliseconds.
"""

import json
import os
import signal
import socket
import sys

VARIABLE = "MOEPROXY_TEMPLATE"
_OWN = ("--language=", "--serialized-runtime-env-context=")  # arguments for Ray's program, not for the worker
_RAYS = "setup_worker.py"


def main() -> None:
    """Hand this process's place over, or go on in it."""
    place, _, owner = os.environ.get(VARIABLE, "").rpartition(":")
    arguments = sys.argv[1:]
    if place and asked(place, [argument for argument in arguments if not argument.startswith(_OWN)]):
        return
    if place:
        os.kill(int(owner), 0)  # an error, which is this program's end, when it is gone: nobody needs a worker
    other = os.path.join(os.path.dirname(arguments[0]), _RAYS)
    first = [other] if os.path.exists(other) else []
    os.execv(sys.executable, [sys.executable, *first, *arguments])


def asked(place: str, arguments: list[str]) -> bool:
    """Return whether a template forked the program, with all that this process was given."""
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "blocked": blocked}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(place)
            socket.send_fds(connection, [b"\0"], [0, 1, 2])
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            return bool(connection.recv(32))  # the number of the process
    except OSError:
        return False


if __name__ == "__main__":
    main()
