"""Reads the numbers back out of a report."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import numpy as np


def data_of(document: str) -> Any:
    """The JSON document in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', document, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def unpacked(column: dict[str, Any]) -> list[int]:
    """A packed column's numbers."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(column["z"])), np.uint8).reshape(8, -1)
    return np.cumsum(np.ascontiguousarray(planes.T).view("<i8").reshape(-1)).tolist()
