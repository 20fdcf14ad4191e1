"""Allocator settings: PyTorch's own grammar, and mistakes that are named."""

from __future__ import annotations

import pytest

from brim.allocator.config import AllocatorConfig, known_keys
from brim.errors import FormatError, UsageError
from brim.units import GIB, MIB


def test_settings_are_read_and_written_back():
    text = "expandable_segments:True,max_split_size_mb:256,garbage_collection_threshold:0.8"
    config = AllocatorConfig.parse(f" {text.replace(',', ' , ')} ")
    assert config.expandable_segments
    assert config.max_split_bytes == 256 * MIB
    assert config.garbage_collection_threshold == 0.8
    assert AllocatorConfig.parse(config.describe()) == config
    assert AllocatorConfig().describe() == ""


def test_the_order_of_settings_does_not_matter():
    config = AllocatorConfig.parse("max_split_size_mb:40,large_segment_size_mb:32")
    assert (config.large_segment_bytes, config.max_non_split_rounding_bytes) == (32 * MIB, 32 * MIB)
    with pytest.raises(UsageError, match="32 or more"):
        AllocatorConfig.parse("max_split_size_mb:31,large_segment_size_mb:32")


def test_settings_without_effect_on_addresses_are_accepted():
    assert AllocatorConfig.parse("pinned_use_background_threads:True,backend:native") == AllocatorConfig()


def test_reserves_are_fractions_or_sizes():
    assert AllocatorConfig.parse("expandable_segments_reserve:0.5").reserve == 0.5
    assert AllocatorConfig.parse("expandable_segments_reserve:40G").reserve == 40 * GIB


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("8", (8,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[64:4]", (4,) * 7 + (0,) * 9),
    ],
)
def test_divisions_by_interval(text, divisions):
    config = AllocatorConfig.parse(f"roundup_power2_divisions:{text}")
    assert config.roundup_power2_divisions == divisions
    assert AllocatorConfig.parse(config.describe()) == config


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("expandable_segment:True", "expandable_segments"),
        ("max_split_size:64", "max_split_size_mb"),
        ("xyz:1", "has no setting"),
        ("expandable_segments:true", "True or False"),
        ("expandable_segments", "key:value"),
        ("max_split_size_mb:19", "20 or more"),
        ("max_split_size_mb:many", "20 or more"),
        ("max_split_size_mb:[1:2]", "single value"),
        ("large_segment_size_mb:10", "11 or more"),
        ("garbage_collection_threshold:1.0", "above 0 and below 1"),
        ("garbage_collection_threshold:nan", "above 0 and below 1"),
        ("per_process_memory_fraction:1.5", "from 0 to 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:2]", "powers of two"),
        ("roundup_power2_divisions:[256:3]", "power of two"),
        ("roundup_power2_divisions:[256]", "list like"),
        ("backend:best", "native"),
        ("expandable_segments_reserve:-1", "fraction of the device"),
        ("a:b:c", "key:value"),
        ("expandable_segments:True,,", "key:value"),
    ],
)
def test_mistakes_are_named(text, told):
    with pytest.raises(UsageError, match=told):
        AllocatorConfig.parse(text)


def test_every_setting_that_is_offered_is_known():
    assert "expandable_segments" in known_keys()
    assert len(set(known_keys())) == len(known_keys())


def test_snapshot_settings_are_read_by_value():
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
        "max_split_size": 128 * MIB,
        "garbage_collection_threshold": 0.5,
        "expandable_segments": True,
        "roundup_power2_divisions": {str(1 << index): 4 for index in range(16)},
    }
    config = AllocatorConfig.from_snapshot(settings)
    assert config.max_split_bytes == 128 * MIB
    assert config.expandable_segments
    assert config.roundup_power2_divisions == (4,) * 16
    assert AllocatorConfig.from_snapshot({}) == AllocatorConfig()
    assert AllocatorConfig.from_snapshot({"max_split_size": -1}).max_split_bytes is None


@pytest.mark.parametrize(
    "settings",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "nonsense"},
        {"roundup_power2_divisions": {"1": 3}},
        {"roundup_power2_divisions": {str(1 << index): "x" for index in range(16)}},
    ],
)
def test_damaged_snapshot_settings_are_refused(settings):
    with pytest.raises(FormatError):
        AllocatorConfig.from_snapshot(settings)
