"""Run a program unchanged inside a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from brim.cli.options import BUDGET, HTML, JSON, PROGRAM_DEVICE, RAM_HELP, VRAM_HELP, Command, OutputFile, paths


class ProgramCommand(Command):
    """Options end with the script's name, or with ``-m MODULE``, as they do for python."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {opt for p in self.params if isinstance(p, click.Option) and p.is_flag for opt in p.opts}
        at = 0
        while at < len(args) and args[at].startswith("-"):
            word = args[at]
            if word.startswith("-m"):
                end = at + (2 if word == "-m" else 1)
                return super().parse_args(ctx, [*args[:end], "--", *args[end:]])
            alone = "=" in word or word in flags or word in ctx.help_option_names
            at += 1 if alone or word == "--" else 2
        return super().parse_args(ctx, args)


@click.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
@click.option("--vram", type=BUDGET, help=VRAM_HELP)
@click.option("--ram", type=BUDGET, help=RAM_HELP)
@click.option(
    "--mode",
    type=click.Choice(["auto", "stream", "unified", "off"]),
    default="auto",
    show_default=True,
    help="stream: plan every model. unified: VRAM, then RAM read over the link. auto: the one, else the other.",
)
@click.option(
    "--device",
    type=PROGRAM_DEVICE,
    default="auto",
    show_default=True,
    help="cpu: what the program does with CUDA is done on the CPU where there is no CUDA. cuda:1: the program sees "
    "that GPU alone.",
)
@click.option("--report", type=OutputFile(HTML, JSON), help="Write what became of each model: .html or .json.")
@click.option("--managed", is_flag=True, help="In unified mode: managed memory instead of page-locked RAM.")
@click.option("--insist", is_flag=True, help="Managed memory beyond what the device has free. It can hang a driver.")
@click.option("-m", "module", metavar="MODULE", is_flag=False, help="Run a module, as python -m does.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=paths, metavar="[SCRIPT] [ARGS]...")
def run(
    vram: int | str | None,
    ram: int | str | None,
    mode: str,
    device: str,
    report: Path | None,
    managed: bool,
    insist: bool,
    module: str | None,
    arguments: tuple[str, ...],
) -> Callable[[], int]:
    """Run a program unchanged inside a memory budget.

    Options after SCRIPT (or -m MODULE) are the program's own. Its output, exit code, signals and tracebacks are those
    of python SCRIPT. Models that fit are left alone; others are planned and fitted at their first call.
    """
    from brim.run.script.run import run as launch
    from brim.run.script.script import Program
    from brim.run.script.settings import Settings

    if module is None and not arguments:
        raise click.UsageError("Name a script, or a module with -m.")
    if module is None:
        target, *rest = arguments
        if not Path(target).exists():
            raise click.UsageError(f"There is no file {target!r}.")
    else:
        target, rest = module, list(arguments)
    program = Program(target=target, arguments=tuple(rest), is_module=module is not None)
    settings = Settings(vram=vram, ram=ram, mode=mode, device=device, report=report, managed=managed, insist=insist)
    if ram is not None:
        from brim.core.hardware import RAM
        from brim.measure.capacity import amount_bytes, check_room  # not for a program without a budget

        check_room(amount_bytes(ram, RAM))  # and again at the first model, with all that is loaded by then
    return lambda: launch(program, settings)
