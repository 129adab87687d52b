"""Latency and memory of `nearkin serve` under load on the loopback address.

    python benchmarks/serving.py photos.index --images photos/ --requests 200 --at-once 8

Starts the server, sends it images (whole files, one connection each), and polls /health ten times a second meanwhile.
Prints a table of client-side latencies in milliseconds.
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
    parser.add_argument("index", type=Path, help="index folder")
    parser.add_argument("--images", type=Path, required=True, help="folder of images to send")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2, help="of the server")
    args = parser.parse_args()
    command = [sys.executable, "-m", "nearkin", "serve", str(args.index), "--port", "0", "--workers", str(args.workers)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = re.search(r"http://\S+/", server.stdout.readline())
        if url is None:
            sys.exit("the server did not start")
        print(table(measure(url[0], args, server.pid)))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)


def measure(url: str, args: argparse.Namespace, pid: int) -> dict[str, np.ndarray | float]:
    paths = list_image_files(args.images, [], [])
    chosen = [paths[i] for i in np.linspace(0, len(paths) - 1, args.requests).astype(int)]
    bodies = [path.read_bytes() for path in chosen]
    for body in bodies[:8]:  # warm up
        request_seconds(url, "POST", "/search", body)
    sequential = [request_seconds(url, "POST", "/search", body) for body in bodies[:50]]
    health: list[float] = []
    done = threading.Event()

    def poll_health() -> None:
        while not done.wait(0.1):
            health.append(request_seconds(url, "GET", "/health"))

    poller = threading.Thread(target=poll_health)
    poller.start()
    start = time.perf_counter()
    with ThreadPoolExecutor(args.at_once) as pool:
        concurrent = list(pool.map(lambda body: request_seconds(url, "POST", "/search", body), bodies))
    seconds = time.perf_counter() - start
    done.set()
    poller.join()
    first = re.search(rb'"id":"((?:[^"\\]|\\.)*)"', fetch(url, "GET", "/items?limit=1"))
    assert first is not None
    item = quote(first[1])
    items = [request_seconds(url, "GET", f"/items/neighbours?id={item}") for _ in range(100)]
    memory = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return {
        "one image at a time": np.array(sequential),
        f"{args.at_once} images at a time": np.array(concurrent),
        "health, meanwhile": np.array(health),
        "neighbours of an item": np.array(items),
        "rate": len(concurrent) / seconds,
        "memory": int(memory[1]) / 1000 if memory else float("nan"),
    }


def request_seconds(url: str, method: str, path: str, body: bytes | None = None) -> float:
    """Return the seconds until the response is complete; an error ends the benchmark."""
    start = time.perf_counter()
    fetch(url, method, path, body)
    return time.perf_counter() - start


def fetch(url: str, method: str, path: str, body: bytes | None = None) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/octet-stream"} if body is not None else {})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"{method} {path}: {response.status} {data[:200]!r}")
    return data


def table(results: dict[str, np.ndarray | float]) -> str:
    """Format the results as a Markdown table."""
    lines = ["| milliseconds | requests | p50 | p95 | p99 | max |", "|---|---|---|---|---|---|"]
    for name, values in results.items():
        if isinstance(values, np.ndarray):
            quantiles = " | ".join(f"{1000 * np.quantile(values, q):.0f}" for q in (0.5, 0.95, 0.99, 1))
            lines.append(f"| {name} | {len(values)} | {quantiles} |")
    lines += ["", f"{results['rate']:.1f} images per second, no errors; peak memory {results['memory']:,.0f} MB."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
