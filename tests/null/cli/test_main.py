"""The command line as a user meets it: start-up, help, mistakes, exit codes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import click
import psutil
import pytest

from brim import __version__
from brim.cli import COMMANDS, brim, main
from brim.cli.options import BUDGET


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "brim", *arguments], capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["nonsense"],
        ["plan", "--help"],
        ["estimate", "--help"],
        ["estimate", "no/such/model"],
        ["plan", "no/such/model"],
    ],
)
def test_start_up_imports_neither_torch_nor_what_a_command_needs(arguments):
    code = (
        "import sys\nfrom brim.cli import main\n"
        f"main({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'psutil', 'safetensors', 'brim.cli.probe'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_python_m_brim_is_brim():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"brim {__version__}\n")


def test_help_lists_every_command_with_its_line(capsys):
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, (_, line) in COMMANDS.items():
        assert f"{name} {line}" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_each_command_says_of_itself(name):
    command = brim.get_command(click.Context(brim), name)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help is not None
    assert command.help.splitlines()[0] == COMMANDS[name][1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["prboe"], "Did you mean probe?"),
        (["xyz"], "Commands are"),
        (["probe", "--refrsh"], "--refresh"),
        (["probe", "--device", "tpu"], "cuda"),
        (["probe", "extra"], "unexpected extra argument"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_says_what_was_meant(arguments, told, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert told in output.err


@pytest.mark.thorough
def test_a_brim_error_is_told_without_a_traceback(tmp_path):
    done = run("probe", "--directory", str(tmp_path / "missing"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert "There is no such directory." in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    @click.command()
    def stuck() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[__name__], "stuck", stuck, raising=False)
    monkeypatch.setitem(COMMANDS, "stuck", (f"{__name__}:stuck", ""))
    assert main(["stuck"]) == 130
    assert "Interrupted." in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    ],
)
def test_memory_that_the_system_has_not_is_one_error(error, monkeypatch, capsys):
    @click.command()
    def hungry() -> None:
        raise error

    monkeypatch.setattr(sys.modules[__name__], "hungry", hungry, raising=False)
    monkeypatch.setitem(COMMANDS, "hungry", (f"{__name__}:hungry", ""))
    assert main(["hungry"]) == 3
    told = capsys.readouterr().err
    assert "Error: The command cannot continue." in told and "no more memory: " in told


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/meminfo"), psutil.NoSuchProcess(1)]
)
def test_a_machine_without_proc_is_one_error(error, monkeypatch, capsys):
    @click.command()
    def looking() -> None:
        raise error

    monkeypatch.setattr(sys.modules[__name__], "looking", looking, raising=False)
    monkeypatch.setitem(COMMANDS, "looking", (f"{__name__}:looking", ""))
    with pytest.raises(type(error)):  # it is there: something else is wrong
        main(["looking"])
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert main(["looking"]) == 2
    assert "Linux reports it in /proc" in capsys.readouterr().err


def test_amounts_of_memory_are_options_in_the_usual_writing(capsys):
    @click.command()
    @click.option("--ram", type=BUDGET)
    def command(ram: int) -> int:
        return ram

    assert command.main(["--ram", "1.5GiB"], standalone_mode=False) == 3 << 29
    with pytest.raises(click.BadParameter, match="8GiB, 512MiB"):
        command.main(["--ram", "3 GiBs"], standalone_mode=False)
