"""Query a running `nearkin serve`: by an image file, then by the nearest indexed item.

    nearkin serve photos.index --port 8000
    python examples/serving.py http://127.0.0.1:8000 new.jpg

Uses only the standard library.
"""

import json
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote


def main() -> None:
    url, image = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    result = request(f"{url}/search?k=3", image.read_bytes())
    print(f"{image.name}: {'known' if result.get('known') else 'unknown or not calibrated'}")
    for hit in result["hits"]:
        print(f"  {hit['similarity']:.3f}  {hit['label']}  {hit['id']}")
    nearest = result["hits"][0]["id"]
    print(f"neighbours of {nearest}:")
    for hit in request(f"{url}/items/neighbours?id={quote(nearest)}&k=3")["hits"]:
        print(f"  {hit['similarity']:.3f}  {hit['label']}  {hit['id']}")


def request(url: str, body: bytes | None = None) -> dict:
    headers = {"Content-Type": "application/octet-stream"} if body else {}
    with urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers), timeout=30) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
