"""A search for plans holds no weights: each proof gives the module its very tensors back, which have no bytes."""

from __future__ import annotations

import json
from pathlib import Path

from brim.planning.generation import propose
from brim.planning.opening import open_subject
from brim.planning.request import Request, machine_of
from brim.techniques.streaming.placement import RESIDENT
from brim.techniques.streaming.weight_streaming import NAME
from support.planned import LLAMA


def test_a_search_leaves_the_models_tensors_as_they_were(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    asked = Request(model=config, gpu="RTX 3060", ram="8GiB", seq=64, new_tokens=16)
    subject = open_subject(asked, machine_of(asked))
    before = {name: p.untyped_storage()._cdata for name, p in subject.module.named_parameters()}
    assert set(propose(subject).plan.choices(NAME).values()) == {RESIDENT}
    assert {name: p.untyped_storage()._cdata for name, p in subject.module.named_parameters()} == before
