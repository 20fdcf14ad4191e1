"""Every model in the catalog builds, and has exactly as many parameters as its authors say."""

import diffusers
import pytest
import torch
import transformers

from brim import catalog
from brim.errors import UsageError


def build(preset):
    with torch.device("meta"):
        if preset.library == "diffusers":
            return getattr(diffusers, preset.architecture).from_config(dict(preset.config))
        config = transformers.AutoConfig.for_model(**preset.config)
        return getattr(transformers, preset.architecture)(config)


@pytest.mark.parametrize("name", catalog.model_names())
def test_it_builds_with_the_published_parameter_count(name):
    preset = catalog.model(name)
    count = sum(p.numel() for p in build(preset).parameters())
    assert preset.parameters in (None, count)
    assert len(preset.source) > 10


def test_gpt3_is_174_6_billion():
    """arXiv 2005.14165 prints 175.0 B; its dimensions give 174.6 B with the embeddings tied."""
    count = sum(p.numel() for p in build(catalog.model("gpt3-175b")).parameters())
    assert count == pytest.approx(175.0e9, rel=0.003)


def test_the_names_that_the_command_line_promises():
    promised = (
        "llama-3-70b qwen3-8b deepseek-v3 gpt2 bert-base t5-base llama-3-8b gpt3-175b vit-b-16 resnet50 sd-unet"
    )
    assert {*promised.split(), "whisper-large-v3"} <= set(catalog.model_names())
    assert len(catalog.model_names()) >= 40


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.2-3B", "llama-3.2-3b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("openai-community/gpt2", "gpt2"),
        ("bert-base-uncased", "bert-base"),
        ("google-t5/t5-base", "t5-base"),
    ],
)
def test_names_and_hub_ids(asked, name):
    assert catalog.model(asked).name == name


@pytest.mark.parametrize(
    ("asked", "near"), [("llama3-8b", "llama-3-8b"), ("gpt-2", "gpt2"), ("some/bert-bse", "bert-base")]
)
def test_an_unknown_model_names_the_nearest(asked, near):
    with pytest.raises(UsageError, match=near):
        catalog.model(asked)


def test_hub_ids_belong_to_one_model_each():
    ids = [hub_id.lower() for name in catalog.model_names() for hub_id in catalog.model(name).hub_ids]
    assert len(ids) == len(set(ids))
