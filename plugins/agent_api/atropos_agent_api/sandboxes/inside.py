"""The first process inside a namespace: makes the listener of the API, starts the program, and says how it ended.

Given to Python as text (`python -I -S -c TEXT ARGUMENTS`), since nothing of ours is to be seen in there: no import but the
standard library's, in this one file. ARGUMENTS are the descriptor of a Unix socket to the keeper, and JSON: "port" (of the
API's listener, or null), "processes" (RLIMIT_NPROC, or null), "argv". It is process 1 of its namespace: what it leaves when it
ends, the kernel kills.
"""

import json
import os
import resource
import signal
import socket
import sys


def main() -> None:
    control, wanted = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    control.set_inheritable(False)
    if wanted["port"] is not None:
        listener = socket.create_server(("127.0.0.1", wanted["port"]), backlog=256)
        socket.send_fds(control, [b'{"event": "listening"}\n'], [listener.fileno()])
        listener.close()
    reading, writing = os.pipe()  # closed by the exec that succeeds
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and programs expect
            if wanted["processes"] is not None:
                _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
                bound = wanted["processes"] if hard == resource.RLIM_INFINITY else min(wanted["processes"], hard)
                resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))
            os.execvpe(wanted["argv"][0], wanted["argv"], os.environ)
        except (OSError, ValueError) as error:
            os.write(writing, (getattr(error, "strerror", None) or str(error)).encode()[:4000])
        os._exit(127)
    os.close(writing)
    with open(reading, "rb") as failure:
        failed = failure.read().decode()
    say(control, {"event": "not_started", "why": failed} if failed else {"event": "started"})
    while True:
        ended, status = os.wait()
        if ended == child:
            break
    left = sum(lives(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid())
    say(control, {"event": "ended", "status": os.waitstatus_to_exitcode(status), "left_running": left})


def lives(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return False
    return text[text.rindex(b")") + 2 :][:1] != b"Z"


def say(control: socket.socket, event: object) -> None:
    control.sendall(json.dumps(event).encode() + b"\n")


main()
