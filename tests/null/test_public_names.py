"""The public interface is these names and no others; importing brim loads nothing heavy."""

import subprocess
import sys

import pytest

import brim


def test_the_exported_names_are_pinned():
    assert brim.__all__ == [
        "__version__",
        "estimate",
        "explain",
        "fit",
        "load",
        "plan",
        "probe",
        "rehearse",
        "simulate",
        "trace",
        "watch",
    ]


def test_every_exported_name_is_there():
    assert all(getattr(brim, name) for name in brim.__all__)
    assert set(brim.__all__) <= set(dir(brim))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'prob'"):
        _ = brim.prob


def test_importing_brim_loads_nothing_heavy():
    code = "import sys, brim; print(sorted({'torch', 'transformers', 'numpy', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
