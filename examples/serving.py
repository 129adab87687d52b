"""Ask a running `nearkin serve` from a program: by a file, by a stored item, and on from what was found.

    nearkin serve photos.index --port 8000
    python examples/serving.py http://127.0.0.1:8000 new.jpg

Only the standard library is used here.
"""

import json
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote


def main() -> None:
    address, picture = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    found = ask(f"{address}/search?k=3", picture.read_bytes())
    print(f"{picture.name}: {'known' if found.get('known') else 'unknown or not calibrated'}")
    for hit in found["hits"]:
        print(f"  {hit['similarity']:.3f}  {hit['label']}  {hit['id']}")
    nearest = found["hits"][0]["id"]
    print(f"and like {nearest}:")
    for hit in ask(f"{address}/items/neighbours?id={quote(nearest)}&k=3")["hits"]:
        print(f"  {hit['similarity']:.3f}  {hit['label']}  {hit['id']}")


def ask(url: str, body: bytes | None = None) -> dict:
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/octet-stream"} if body else {}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
