"""What hostile clients send to a server on this machine: `python -m tests.e2e.attacks KIND PORT SECONDS` is one attacker.

Attackers share the machine's cores with the server. Each uses at most `SHARE` of one core, by its own CPU time, so that what is
measured beside them is what the server does with what they send, and not who gets a core.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache

from tests.raw_http import request

SHARE = 0.05
HEAD = b"POST /scored_data HTTP/1.1\r\nhost: 127.0.0.1\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
JSON_BYTES = 7_900_000
Attack = Callable[[int], None]


def connect(port: int, timeout_s: float = 2.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout_s)


def endless(start: bytes, more: bytes) -> Attack:
    """Until the server has enough."""

    def attack(port: int) -> None:
        with connect(port) as end:
            end.sendall(start)
            for _ in range(1000):
                end.sendall(more)

    return attack


def whole(make: Callable[[], bytes], *, read: bool = True) -> Attack:
    """The same requests again and again, on a connection each time."""
    made = cache(make)

    def attack(port: int) -> None:
        with connect(port, 20.0 if read else 2.0) as end:
            end.sendall(made())
            if read:
                end.shutdown(socket.SHUT_WR)
                while end.recv(1 << 18):
                    pass

    return attack


def kept(count: int, start: bytes) -> Attack:
    """So many connections that are kept open after so much of a request; those that the server closes are opened again."""
    ends: list[socket.socket] = []

    def attack(port: int) -> None:
        for end in list(ends):
            with contextlib.suppress(BlockingIOError):
                try:
                    end.setblocking(False)
                    if end.recv(100) in (b"",):
                        raise ConnectionError
                except ConnectionError:
                    end.close()
                    ends.remove(end)
        for _ in range(min(count - len(ends), 16)):
            end = connect(port)
            ends.append(end)
            end.sendall(start)
        time.sleep(0.01)

    return attack


def unread(data: bytes) -> Attack:
    """Answers that nobody reads."""
    ends: list[socket.socket] = []

    def attack(port: int) -> None:
        if len(ends) == 20:
            ends.pop(0).close()
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        end.settimeout(2.0)
        end.connect(("127.0.0.1", port))
        ends.append(end)
        end.sendall(data)

    return attack


def reset(port: int) -> None:
    end = connect(port)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.sendall(HEAD + b"content-length: 1000\r\n\r\n{")
    end.close()


def scored(body: bytes, **headers: str) -> bytes:
    return request("POST", "/scored_data", body, content_type="application/json", **headers)


def plain_json(size: int = JSON_BYTES) -> bytes:
    """A group of long rows that are no group in the end: all of it is read."""
    row = "[" + "12345," * 1000 + "12345]"
    rows = ",".join([row] * (size // 2 // len(row)))
    return scored(f'{{"tokens":[{rows}],"masks":[{rows}],"scores":[1]}}'.encode())


KINDS: dict[str, Attack] = {
    "header bytes": endless(HEAD + b"x: ", b"y" * 65536),
    "header lines": endless(HEAD, b"a: b\r\n" * 10_000),
    "address": endless(b"GET /", b"a" * 65536),
    "trailers": endless(CHUNKED + b"1\r\n{\r\n0\r\n", b"a: b\r\n" * 10_000),
    "chunk extensions": endless(CHUNKED + b"1;", b"e" * 65536),
    "small chunks": endless(CHUNKED, b"1\r\n1\r\n" * 10_000),
    "whole heads": whole(lambda: HEAD + b"".join(b"h%d: v\r\n" % number for number in range(100_000)) + b"\r\n"),
    "half heads": kept(150, HEAD),
    "idle": kept(150, b""),
    "half bodies": kept(150, HEAD + b"content-length: 5000\r\n\r\n{"),
    "pipelined": whole(lambda: request("GET", "/openapi.json") * 1000),
    "pipelined, unread": unread(request("GET", "/openapi.json") * 1000),
    "connections": whole(lambda: request("GET", "/info")),
    "resets": reset,
    "no HTTP": whole(lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n" * 5),
    "plain JSON": whole(plain_json),
    "plain JSON of 40 MB": whole(lambda: plain_json(40_000_000)),
    "small lists": whole(lambda: scored(b"[" + b"[]," * 290_000 + b"[]]")),
    "numbers": whole(lambda: scored(json.dumps({"tokens": [1.5] * 1_000_000}).encode())),
    "gzip bombs": whole(lambda: scored(gzip.compress(bytes(1 << 28), 9), content_encoding="gzip")),
}


def paced(seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    began, cpu_s = time.monotonic(), time.process_time()
    while time.monotonic() < until:
        yield
        used = time.process_time() - cpu_s
        if (rest := began + used / SHARE - time.monotonic()) > 0:
            time.sleep(min(rest, max(until - time.monotonic(), 0)))


def run(kind: str, port: int, seconds: float) -> None:
    """Prints `ready` once what it sends is made, begins on request, and prints how often it attacked."""
    times, attack = 0, KINDS[kind]
    with contextlib.suppress(OSError):
        attack(port)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in paced(seconds):
        with contextlib.suppress(OSError):
            attack(port)
        times += 1
    print(times)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
