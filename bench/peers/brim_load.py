"""brim itself."""

from __future__ import annotations

from typing import Any

import brim
from peers import Loaded, Setting

TITLE = "brim"
PACKAGE = "brim"
LIMITED = True
CONVERTS_IN_LOAD = False


def prepare(setting: Setting) -> None:
    brim.probe()  # measured once per machine and kept


def load(setting: Setting) -> Loaded:
    model: Any = brim.load(str(setting.checkpoint), ram=setting.budget_bytes)

    def facts() -> dict[str, Any]:
        return {"facts": dict(model.brim.timeline().facts), "plan": model.brim.plan.to_json()}

    return Loaded(
        forward=lambda ids: model(input_ids=ids).logits,
        generate=model.generate,
        facts=facts,
    )
