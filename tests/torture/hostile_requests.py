"""Hostile requests to a real server, with a fixed seed: it answers each with a status below 500 (or 503), or closes the
connection, and still serves afterwards.
"""

from __future__ import annotations

import random
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from helpers.serving import Server, launch

from torture.mutations import make_images, mutate
from torture.table import Row

SECONDS = 15.0  # for a response
UPLOAD_SECONDS = 1.0  # for an upload to arrive
VALID = b"POST /search?k=3 HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s"
WORDS = (
    *(
        b"/",
        b"/search",
        b"/items",
        b"/items/neighbours?id=",
        b"/items/thumbnail?id=",
        b"/info",
        b"/docs/",
        b"/openapi.json",
    ),
    *(b"..%2f..%2fetc%2fpasswd", b"%00", b"%ff", b"%u0041", b"?", b"&k=", b"=", b"#", b"//", b"\\", b"..", b"%2e%2e/"),
    *(
        b"0",
        b"-1",
        b"99999999999999999999",
        b"k=1",
        b"id=x",
        b"offset=1e3",
        b"<script>",
        b"'--",
        b"\xc3\xa9",
        b"A" * 3000,
    ),
)
HEADERS = (
    *(
        b"Content-Length: -1",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 1e3",
        b"Content-Length: " + b"9" * 400,
    ),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked\r\nContent-Length: 4"),
    *(
        b"Content-Type: multipart/form-data",
        b"Content-Type: multipart/form-data; boundary=x",
        b"Content-Type: \xff\xfe",
    ),
    *(
        b"Expect: 100-continue",
        b"Upgrade: websocket\r\nConnection: Upgrade",
        b"Host: evil.example",
        b"Host: ",
        b"Host: [::1",
    ),
    *(
        b"Authorization: Bearer \xff",
        b"If-None-Match: *",
        b"X: " + b"y" * 70_000,
        b"X\0: y",
        b" folded: x",
        b"Range: bytes=0-9999999",
    ),
)


def make_requests(count: int, seed: int) -> list[bytes]:
    """Return raw requests: damaged ones, damaged images and forms, odd paths, odd headers, noise."""
    rng = random.Random(seed)
    images = list(make_images().values())
    made = []
    for number in range(count):
        image = mutate(rng.choice(images), rng)
        match number % 6:
            case 0:
                made.append(mutate(VALID % (len(image), image), rng))
            case 1 | 2:
                made.append(VALID % (len(image), image))
            case 3:
                path = b"/" + b"".join(rng.choices(WORDS, k=rng.randint(1, 4))).lstrip(b"/")
                method = rng.choice((b"GET", b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"TRACE", b"\0", b"G" * 100))
                made.append(method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            case 4:
                lines = b"\r\n".join(rng.choices(HEADERS, k=rng.randint(1, 3)))
                made.append(b"POST /search HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n\r\n" + image)
            case _:
                head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n'
                form = mutate(head + image + b"\r\n--x--\r\n", rng)
                made.append((VALID % (len(form), form)).replace(b"image/jpeg", b"multipart/form-data; boundary=x"))
    return made


def attack_server(index: Path, count: int, seed: int) -> Row:
    """Send the requests to a new server, four at a time."""
    process = launch(str(index), "--port", "0", "--device", "cpu", "--upload-timeout", f"{UPLOAD_SECONDS:g}")
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        found = re.search(r"http://\S+/", process.stdout.readline())
        assert found, process.stderr.read()
        server = Server(process, found[0])
        statuses: dict[int, int] = {}
        failed = 0
        requests = make_requests(count, seed)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda request: send(server, request), requests))
        for request, status in zip(requests, answers, strict=True):
            statuses[status] = statuses.get(status, 0) + 1
            if status == -1 or (status >= 500 and status != 503):
                failed += 1
                print(f"--- request answered with {status}: {request[:300]!r}", file=sys.stderr)
        lost = 0 if server.alive() else 1
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    tracebacks = errors.count("Traceback")
    if tracebacks:
        print(errors[-2000:], file=sys.stderr)
    remark = ", ".join(f"{n:,} x {status or 'closed'}" for status, n in sorted(statuses.items()))
    return Row("hostile HTTP requests", count, count - failed, lost, tracebacks + failed, remark)


def send(server: Server, request: bytes) -> int:
    """Send raw bytes; return the status of the response, 0 for a closed connection, -1 for neither."""
    with socket.create_connection((server.host, server.port), timeout=SECONDS) as line:
        try:
            line.sendall(request)
            # Closed at once, the server would drop most requests unanswered; truncated headers have no time limit.
            line.settimeout(3 * UPLOAD_SECONDS)
            with suppress(TimeoutError):
                return _status(line.recv(100))
            line.settimeout(SECONDS)
            line.shutdown(socket.SHUT_WR)
            return _status(line.recv(100))
        except (ConnectionResetError, BrokenPipeError):
            return 0
        except TimeoutError:
            return -1


def _status(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.[01] ([0-9]{3})", answer)
    return int(found[1]) if found else 0
