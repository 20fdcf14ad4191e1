"""``brim mcp``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import click

from brim.cli.options import command
from brim.errors import BudgetError
from brim.processes import bound, python_command

TOOLS = ("estimate", "plan", "rehearse", "explain")
_INSTRUCTIONS = (
    "brim predicts the memory of PyTorch programs without a GPU. Each tool is the command of brim with its name: "
    "`arguments` has the words after it, and the answer is the document of --json."
)


@dataclass(frozen=True, kw_only=True)
class McpOptions:
    """The options of ``brim mcp``: it has none."""


@command(McpOptions)
def mcp(options: McpOptions) -> None:
    """Serve estimate, plan, rehearse and explain to a program, by the Model Context Protocol.

    The server reads requests from the standard input until it ends, and opens no port. Each request runs a command of
    brim, which reads and writes the files that its arguments name; rehearse runs a program. Needs the package mcp:
    pip install "brim[mcp]".
    """
    from mcp.server import MCPServer

    from brim.version import __version__

    parent = click.get_current_context().find_root()
    commands: click.Group = parent.command  # type: ignore[assignment]
    server = MCPServer("brim", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING")
    for name in TOOLS:
        subcommand = commands.get_command(parent, name)
        assert subcommand is not None, "it is among the commands"
        description = subcommand.get_help(click.Context(subcommand, info_name=name, parent=parent))
        server.tool(name=name, description=description, structured_output=False)(_tool(name))
    server.run()


def _tool(name: str) -> Callable[[list[str]], str]:
    def run(arguments: list[str]) -> str:
        from mcp.server.mcpserver.exceptions import ToolError

        words = bound(python_command("-m", "brim", name, "--json", *arguments))
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode not in (0, BudgetError.exit_code):  # the answer says that nothing fits
            raise ToolError(done.stderr.strip() or f"It ended with exit code {done.returncode}.")
        return done.stdout

    return run
