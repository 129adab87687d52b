"""Latency of `nearkin serve` under load on the loopback address, and what the load costs it.

    python benchmarks/serving.py photos.index --images photos/ --requests 200 --at-once 8

Starts the server, sends it pictures (whole files, a new connection each), and meanwhile asks for its health ten times a
second. Prints a table of latencies as the client sees them, in milliseconds.
"""

from __future__ import annotations

import argparse
import http.client
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np

from nearkin.data.listing import list_image_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, help="folder of an index")
    parser.add_argument("--images", type=Path, required=True, help="folder of images to send")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2, help="of the server")
    args = parser.parse_args()
    command = [sys.executable, "-m", "nearkin", "serve", str(args.index), "--port", "0", "--workers", str(args.workers)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+/", server.stdout.readline())
        if found is None:
            sys.exit("the server did not start")
        print(table(measure(found[0], args, server.pid), args))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)


def measure(url: str, args: argparse.Namespace, pid: int) -> dict[str, np.ndarray | float]:
    paths = list_image_files(args.images, [], [])
    chosen = [paths[i] for i in np.linspace(0, len(paths) - 1, args.requests).astype(int)]
    bodies = [path.read_bytes() for path in chosen]
    for body in bodies[:8]:  # threads start, memory is taken
        ask(url, "POST", "/search", body)
    alone = [ask(url, "POST", "/search", body) for body in bodies[:50]]
    health: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            health.append(ask(url, "GET", "/health"))

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    with ThreadPoolExecutor(args.at_once) as many:
        loaded = list(many.map(lambda body: ask(url, "POST", "/search", body), bodies))
    seconds = time.perf_counter() - began
    done.set()
    watching.join()
    first = re.search(rb'"id":"((?:[^"\\]|\\.)*)"', fetch(url, "GET", "/items?limit=1"))
    assert first is not None
    item = quote(first[1])
    items = [ask(url, "GET", f"/items/neighbours?id={item}") for _ in range(100)]
    memory = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return {
        "one picture at a time": np.array(alone),
        f"{args.at_once} pictures at a time": np.array(loaded),
        "health, meanwhile": np.array(health),
        "neighbours of an item": np.array(items),
        "rate": len(loaded) / seconds,
        "memory": int(memory[1]) / 1000 if memory else float("nan"),
    }


def ask(url: str, method: str, path: str, body: bytes | None = None) -> float:
    """Seconds until the whole answer is there; anything but success ends the benchmark."""
    began = time.perf_counter()
    fetch(url, method, path, body)
    return time.perf_counter() - began


def fetch(url: str, method: str, path: str, body: bytes | None = None) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/octet-stream"} if body is not None else {})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{method} {path}: {answer.status} {data[:200]!r}")
    return data


def table(found: dict[str, np.ndarray | float], args: argparse.Namespace) -> str:
    lines = ["| milliseconds | requests | p50 | p95 | p99 | largest |", "|---|---|---|---|---|---|"]
    for name, values in found.items():
        if isinstance(values, np.ndarray):
            shown = " | ".join(f"{1000 * np.quantile(values, q):.0f}" for q in (0.5, 0.95, 0.99, 1))
            lines.append(f"| {name} | {len(values)} | {shown} |")
    lines += ["", f"{found['rate']:.1f} pictures a second, no error; at most {found['memory']:,.0f} MB of memory."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
