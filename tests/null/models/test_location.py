"""What a name means where there is no such file or folder."""

from pathlib import Path

import huggingface_hub
import pytest

from brim.errors import ModelError
from brim.models.location import locate


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"),  # a name of the catalog: what brim plan prints
        ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("somebody/of-no-catalog", "somebody/of-no-catalog"),
    ],
)
def test_a_name_of_the_catalog_is_fetched_by_its_hub_id(
    name: str, repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: asked.append(repo) or str(tmp_path))
    assert locate(name) == tmp_path
    assert asked == [repo]


def test_where_it_cannot_be_fetched_both_names_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repo: str, **_: object) -> str:
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"llama-3.2-1b was given as the model: meta-llama/Llama-3.2-1B[.]"):
        locate("llama-3.2-1b")
