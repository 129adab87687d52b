"""Fit one method of metric-learn and print the result as JSON: `python linear_peer.py METHOD FILE.npz`.

metric-learn 0.7 does not support scikit-learn 1.6 and later, so it runs in its own environment, which needs only numpy,
scikit-learn and metric-learn. The file contains x, y and, for evaluation, x_test and y_test (accuracy of 3 nearest
neighbours) or fresh and fresh_labels (R@1 among themselves).
"""

import json
import resource
import sys
import time
import warnings

import numpy as np
from metric_learn import LMNN, NCA, MMC_Supervised
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

METHODS = {
    "mmc": lambda: MMC_Supervised(random_state=0),
    "nca": lambda: NCA(random_state=0),
    "lmnn": lambda: LMNN(random_state=0),
}
MAX_MEMORY = 8 << 30  # bytes


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    method, path = sys.argv[1:]
    with np.load(path) as file:
        data = dict(file)
    warnings.simplefilter("ignore")
    start = time.process_time()
    metric = METHODS[method]().fit(data["x"], data["y"])
    result = {
        "seconds": time.process_time() - start,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if "x_test" in data:
        classifier = KNeighborsClassifier(3).fit(metric.transform(data["x"]), data["y"])
        result["accuracy"] = classifier.score(metric.transform(data["x_test"]), data["y_test"])
    if "fresh" in data:
        mapped, labels = metric.transform(data["fresh"]), data["fresh_labels"]
        nearest = NearestNeighbors(n_neighbors=1).fit(mapped).kneighbors(return_distance=False)[:, 0]
        result["recall"] = float((labels[nearest] == labels).mean())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
