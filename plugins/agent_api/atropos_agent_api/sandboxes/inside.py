"""The first process inside a namespace or a container: open the listener of the API, start the program, and report how it ended.

Passed to Python as text (`python -I -S -c TEXT CONTROL JSON`), since our files are not visible inside. So it is one file that imports
only the standard library. CONTROL leads to the monitor: a descriptor of a Unix socket, or the path of one, which first sends the
environment variables. JSON has "port" (of the API's listener, or null), "processes" (RLIMIT_NPROC, or null), "most" (the number of
processes that this one allows, if they are not counted outside, or null) and "argv". It is process 1 of its namespace: when it ends,
the kernel kills what is left there.
"""

import json
import os
import resource
import signal
import socket
import sys

LOOK_S = 0.1


def main() -> None:
    wanted = json.loads(sys.argv[2])
    if sys.argv[1].isdecimal():
        control = socket.socket(fileno=int(sys.argv[1]))
        control.set_inheritable(False)
    else:
        control = socket.socket(socket.AF_UNIX)
        control.connect(sys.argv[1])
        with control.makefile("rb") as sent:
            os.environ.update(json.loads(sent.readline()))
    if wanted["port"] is not None:
        listener = socket.create_server(("127.0.0.1", wanted["port"]), backlog=256)
        socket.send_fds(control, [b'{"event": "listening"}\n'], [listener.fileno()])
        listener.close()
    reading, writing = os.pipe()  # a successful exec closes it
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, but programs expect it
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
    if wanted["most"] is not None:
        signal.signal(signal.SIGALRM, lambda *_: look(control, wanted["most"]))
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    while True:
        ended, status = os.wait()
        if ended == child:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    left = others()
    say(control, {"event": "ended", "status": os.waitstatus_to_exitcode(status), "left_running": left})


def look(control: socket.socket, most: int) -> None:
    if others() > most:
        say(control, {"event": "processes"})


def others() -> int:
    """The number of processes in addition to this one."""
    return sum(lives(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid())


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
