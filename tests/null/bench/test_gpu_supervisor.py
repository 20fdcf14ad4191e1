"""Cases that crash or hang are recorded, and the others are run all the same."""

import time

import pytest

from support import benches

bench = benches.load("_gpu_supervisor")

WORKER = """
import json, os, sys, time
request = json.load(open(sys.argv[1]))
for case in request["cases"]:
    if case["does"] == "crash":
        os._exit(11)
    if case["does"] == "hang":
        time.sleep(60)
    with open(request["result"], "a") as handle:
        handle.write(json.dumps({"case": case, "factor": request["factor"]}) + "\\n")
"""


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_START_S", 4.0)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def make(left_s=60.0, case_limit_s=0.5):
        return bench.Supervisor(
            script=script,
            request={"factor": 2},
            environment={},
            case_limit_s=case_limit_s,
            end_s=time.monotonic() + left_s,
        )

    return make


def cases(*what):
    return [{"name": f"{number}-{does}", "does": does} for number, does in enumerate(what)]


def test_what_crashes_or_hangs_is_told_and_the_rest_is_run(supervisor):
    asked, told = cases("run", "crash", "run", "hang", "run"), []
    made = supervisor().run(asked, told.append)
    assert made == told
    assert [record["case"] for record in made] == asked
    assert [record.get("error", "") for record in made] == [
        "", "the worker ended with 11", "", "no result in 0 s", "",
    ]  # fmt: skip
    assert [record.get("factor") for record in made] == [2, None, 2, None, 2]


@pytest.mark.thorough
def test_what_there_is_no_time_for_is_left_out(supervisor):
    made = supervisor(left_s=2.0, case_limit_s=30.0).run(cases("run", "hang", "run"), lambda record: None)
    assert [record["case"]["name"] for record in made] == ["0-run"]
