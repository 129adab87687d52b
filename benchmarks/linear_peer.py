"""One fit of metric-learn, in an interpreter of its own: `python linear_peer.py METHOD FILE.npz`, answers in JSON.

metric-learn 0.7 does not run with scikit-learn 1.6 and later, so it lives in another environment than nearkin. Needs
numpy, scikit-learn and metric-learn only. The file holds x, y and, to judge by,
x_test and y_test (accuracy of 3 nearest neighbours) or fresh and fresh_labels (R@1 among themselves).
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


MEMORY = 8 << 30  # bytes; beyond it the fit fails instead of taking the machine down


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    method, path = sys.argv[1:]
    with np.load(path) as file:
        data = dict(file)
    warnings.simplefilter("ignore")
    began = time.process_time()
    metric = METHODS[method]().fit(data["x"], data["y"])
    answer = {
        "seconds": time.process_time() - began,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if "x_test" in data:
        nearest = KNeighborsClassifier(3).fit(metric.transform(data["x"]), data["y"])
        answer["accuracy"] = nearest.score(metric.transform(data["x_test"]), data["y_test"])
    if "fresh" in data:
        mapped, labels = metric.transform(data["fresh"]), data["fresh_labels"]
        near = NearestNeighbors(n_neighbors=1).fit(mapped).kneighbors(return_distance=False)[:, 0]
        answer["recall"] = float((labels[near] == labels).mean())
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
