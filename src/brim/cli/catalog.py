"""``brim models`` and ``brim gpus``: list the catalog by the names that other commands accept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click

from brim import catalog
from brim.cli.options import command, json_field, print_json
from brim.core.options import option
from brim.errors import UsageError
from brim.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """The options of ``brim models`` and ``brim gpus``."""

    words: tuple[str, ...] = option((), argument=True)
    as_json: bool = json_field()


@command(ListOptions)
def models(options: ListOptions) -> None:
    """List the model configurations of the catalog.

    With WORDS, only models that have all words in a name or hub id, for example: brim models qwen 7b. For other
    models, commands take a folder with a config.json, or that file.
    """
    listed = [
        preset
        for preset in map(catalog.model, catalog.model_names())
        if _has(options.words, (preset.name, *preset.hub_ids))
    ]
    _check(options.words, listed, "models")
    if options.as_json:
        print_json({
            "models": [
                {"name": preset.name, "parameters": preset.parameters, "library": preset.library,
                 "architecture": preset.architecture, "hub_ids": list(preset.hub_ids), "source": preset.source}
                for preset in listed
            ]
        })  # fmt: skip
        return
    rows = [
        (p.name, f"{p.parameters / 1e9:.3g} B" if p.parameters else "", p.architecture, ", ".join(p.hub_ids))
        for p in listed
    ]
    _print(("model", "parameters", "class", "hub ids"), rows, right={1})


@command(ListOptions)
def gpus(options: ListOptions) -> None:
    """List the GPUs of the catalog.

    With WORDS, only GPUs that have all words in their names, for example: brim gpus rtx 40. For other GPUs, give the
    memory by --vram.
    """
    listed = [
        card for card in map(catalog.gpu, catalog.gpu_names()) if _has(options.words, (card.name, *card.aliases))
    ]
    _check(options.words, listed, "gpus")
    if options.as_json:
        print_json({
            "gpus": [
                {"name": card.name, "aliases": list(card.aliases), "vendor": card.vendor,
                 "capacity_bytes": card.capacity_bytes, "bytes_per_s": card.bytes_per_s,
                 "flops_per_s": dict(card.flops_per_s)}
                for card in listed
            ]
        })  # fmt: skip
        return
    rows = [
        (card.name, format_bytes(card.capacity_bytes), _per_s(card.bytes_per_s, "B"),
         _per_s(card.flops_per_s.get("bfloat16") or card.flops_per_s.get("float16"), "FLOP"), ", ".join(card.aliases))
        for card in listed
    ]  # fmt: skip
    _print(("GPU", "memory", "bandwidth", "16 bits, dense", "also"), rows, right={1, 2, 3})


def _has(words: Sequence[str], names: Iterable[str]) -> bool:
    text = " ".join(names).lower()
    return all(word.lower() in text for word in words)


def _check(words: Sequence[str], listed: Sequence[object], command: str) -> None:
    if not listed:
        raise UsageError(
            f"{' '.join(words)} was given.", "Nothing in the catalog has these words.", f"Run brim {command}."
        )


def _per_s(rate: float | None, unit: str) -> str:
    return f"{rate / 1e12:.3g} T{unit}/s" if rate else ""


def _print(columns: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> None:
    """Print each row on one line, even on a narrow terminal, for tools such as grep."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
