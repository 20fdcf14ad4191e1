"""``brim mcp``: a client of the mcp package lists and calls the tools."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.cli import brim
from brim.cli.mcp import TOOLS

mcp = pytest.importorskip("mcp")
pytestmark = pytest.mark.thorough

# Ends the process with a traceback if the server binds, listens or connects; the event loop has a pair of its own.
AUDIT = """
import sys
def refuse(event, arguments):
    if event in ("socket.bind", "socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"{event} {arguments}")
sys.addaudithook(refuse)
from brim.cli import main
sys.exit(main(["mcp"]))
"""
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB"
)


def answers(*calls: tuple[str, list[str]]) -> tuple[Any, list[Any]]:
    """The tools of the server, and its answers to ``calls``."""

    async def talk() -> tuple[Any, list[Any]]:
        server = mcp.StdioServerParameters(command=sys.executable, args=["-c", AUDIT], env=dict(os.environ))
        async with mcp.stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            tools = (await session.list_tools()).tools
            return tools, [await session.call_tool(name, {"arguments": words}) for name, words in calls]

    return asyncio.run(talk())


def test_tools_are_the_commands_and_answer_with_their_json(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(MESSAGE)
    tools, (estimate, large, explained, missing) = answers(
        ("estimate", ["gpt2", "--seq", "128", "--gpu", "RTX 4090"]),
        ("estimate", ["llama-3-8b", "--seq", "128", "--gpu", "RTX 3060"]),
        ("explain", [str(log)]),
        ("explain", [str(tmp_path / "missing.log")]),
    )
    assert [tool.name for tool in tools] == list(TOOLS)
    for tool in tools:
        assert tool.description.startswith(f"Usage: brim {tool.name} ")
    assert json.loads(estimate.content[0].text)["fits"] is True
    assert json.loads(large.content[0].text)["fits"] is False
    assert json.loads(explained.content[0].text)["numbers_bytes"]["tried"] == 2 << 30
    assert missing.is_error and "missing.log" in missing.content[0].text
    assert not (estimate.is_error or large.is_error or explained.is_error)


def test_the_server_ends_with_its_input() -> None:
    done = subprocess.run([sys.executable, "-m", "brim", "mcp"], input="", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    from brim.cli import main

    assert main(["mcp"]) == 2
    assert "pip install" in capsys.readouterr().err
    assert "mcp" in brim.list_commands(None)  # type: ignore[arg-type]
