"""``brim explain``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brim.cli.options import json_option, print_json
from brim.errors import FormatError, UsageError
from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.measure.snapshot import DeviceHistory
    from brim.memory.allocator_config import AllocatorConfig


@click.command()
@click.argument("source", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE")
@click.option(
    "--what-if",
    "settings",
    multiple=True,
    metavar="CONF",
    help='Allocator settings to replay the run under, as in "expandable_segments:True". May be repeated; '
    '"best" tries what people are usually told to try.',
)
@json_option
def explain(source: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Explain what memory did, and what it would have done under other settings.

    FILE is a snapshot written by torch.cuda.memory._dump_snapshot() (nothing in it is run), or a log with an
    out-of-memory message; "-" reads from the standard input.
    """
    data = _content(source)
    if not data.startswith(b"\x80"):  # every pickle of protocol 2 or later begins so
        if settings:
            raise UsageError(f"--what-if was given for {source}.", "It holds no run.", "Give a memory snapshot.")
        _explain_message(source, data.decode("utf-8", "replace"), as_json=as_json)
    else:
        _explain_snapshot(source, data, settings, as_json=as_json)


def _explain_snapshot(source: Path, data: bytes, settings: tuple[str, ...], *, as_json: bool) -> None:
    from brim.measure import snapshot
    from brim.memory.allocator_config import AllocatorConfig

    configs = [AllocatorConfig.parse(text) for text in settings if text != "best"]
    found = snapshot.parse(data, str(source))
    devices = [_device(history, configs, best="best" in settings) for history in found.devices]
    if as_json:
        print_json({"kind": "snapshot", "source": str(source), "devices": devices})
    else:
        _print(devices)


def _content(source: Path) -> bytes:
    if str(source) == "-":
        return sys.stdin.buffer.read()
    try:
        return source.read_bytes()
    except OSError as error:
        raise FormatError(f"{source} was to be explained.", f"{error}.") from error


def _explain_message(source: Path, text: str, *, as_json: bool) -> None:
    """Out-of-memory messages in a log: the one that says most is explained, the others are named."""
    from brim.report.oom import primary, read_oom

    messages = read_oom(text)
    chosen = primary(messages)
    others = [message for message in messages if message is not chosen]
    if as_json:
        body = {"kind": "oom", "source": str(source)} | chosen.to_json()
        print_json(body | {"others": [message.to_json() for message in others]})
        return
    click.echo(f"{chosen.family} on {chosen.device}: {chosen.cause.replace('_', ' ')}\n{chosen.why}")
    for name, count in chosen.numbers_bytes.items():
        click.echo(f"  {name.replace('_', ' '):18} {format_bytes(count):>10}  {count:,} bytes")
    for number, advice in enumerate(chosen.advice, 1):
        click.echo(f"{number}. {'' if advice.helps else '(does not help) '}{advice.text}")
        if advice.paste:
            click.echo(f"     {advice.paste}")
    for message in others:
        click.echo(f"also: {message.family} on {message.device}: {message.cause.replace('_', ' ')}")


def _device(history: DeviceHistory, configs: list[AllocatorConfig], *, best: bool) -> dict[str, Any]:
    """One device as plain values: its replay and its what-if runs."""
    import dataclasses

    from brim.memory.allocator_config import AllocatorConfig
    from brim.memory.replay import replay
    from brim.memory.what_if import best as try_all
    from brim.memory.what_if import what_if

    recorded = AllocatorConfig.from_snapshot(history.settings)
    replayed = replay(history, recorded)
    runs = [what_if(history, config) for config in configs] + (try_all(history) if best else [])
    body = dataclasses.asdict(replayed)
    del body["device"]
    return {
        "device": history.device,
        "events": len(history.actions),
        "settings": recorded.describe(),
        "replay": body | {"exact": replayed.exact},
        "what_if": [dataclasses.asdict(run) for run in runs],
    }


def _print(devices: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not devices:
        console.print("The snapshot holds no events and no segments.")
    for device in devices:
        replay = device["replay"]
        settings = device["settings"] or "default settings"
        console.print(f"device {device['device']}: {device['events']:,} events, {settings}", markup=False)
        console.print(
            f"  replayed: {replay['addresses_matched']:,} of {replay['allocations']:,} addresses, "
            f"{replay['segments_matched']:,} of {replay['segments']:,} segments agree",
            markup=False,
        )
        console.print(
            f"  reserved at the peak: {format_bytes(replay['peak_reserved_measured_bytes'])} measured, "
            f"{format_bytes(replay['peak_reserved_replayed_bytes'])} replayed; "
            f"allocated {format_bytes(replay['peak_allocated_replayed_bytes'])}",
            markup=False,
        )
        if replay["ooms"]:
            console.print(f"  out of memory: {replay['ooms']} times", markup=False)
        for run in device["what_if"]:
            console.print(f"  {_what_if_line(run, replay['peak_reserved_measured_bytes'])}", markup=False)


def _what_if_line(run: dict[str, Any], measured_bytes: int) -> str:
    fits = {None: "", True: ", would have fit", False: ", would not have fit"}[run["would_fit"]]
    change = run["peak_reserved_bytes"] - measured_bytes
    return (
        f"with {run['settings'] or 'default settings'}: {format_bytes(run['peak_reserved_bytes'])} "
        f"({'+' if change >= 0 else '-'}{format_bytes(abs(change))}){fits}"
    )
