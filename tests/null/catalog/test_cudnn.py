from pathlib import Path

import pytest

from brim.catalog.cudnn import cudnn_version


@pytest.mark.parametrize(
    ("asked", "version"),
    [
        ('nvidia-cudnn-cu13==9.24.0.43; platform_system == "Linux"', 92_400),
        ('nvidia-cudnn-cu12==9.10.2.21; platform_system == "Linux"', 91_002),
        ("nvidia-cudnn-cu12 (==8.9.2.26)", 8_902),
        ("nvidia-cublas==13.1.0", None),
    ],
)
def test_the_version_is_as_pip_is_asked_for(tmp_path: Path, asked: str, version: int | None) -> None:
    (tmp_path / "torch-2.14.1.dist-info").mkdir()
    text = f"Name: torch\nRequires-Dist: filelock\nRequires-Dist: {asked}\n"
    (tmp_path / "torch-2.14.1.dist-info" / "METADATA").write_text(text)
    assert cudnn_version(tmp_path) == version


def test_a_build_that_asks_for_none(tmp_path: Path) -> None:
    assert cudnn_version(tmp_path) is None
