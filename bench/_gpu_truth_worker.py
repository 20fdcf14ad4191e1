"""Predicts or measures the cases of one family, one after the other. Started by gpu_truth.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.gpu.runs import Weights, measure, predict
from support.gpu.zoo import Case


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    cases = [Case.of(document) for document in request["cases"]]
    weights = Weights()
    for position, case in enumerate(cases):
        if request["what"] == "predict":
            record = predict(case, tuple(request["capability"]), request["device"])
        else:
            record = measure(case, request["device_type"], position, request["predicted"].get(case.name, {}), weights)
        with Path(request["result"]).open("a") as handle:
            handle.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
