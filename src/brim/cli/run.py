"""Run a program unchanged inside a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from brim.cli.options import ProgramCommand, command, module_field, program_field, program_of
from brim.core.options import build
from brim.run.script.settings import Settings


@dataclass(frozen=True, kw_only=True)
class RunOptions(Settings):
    """The options of ``brim run``: its settings, and the program."""

    module: str | None = module_field()
    arguments: tuple[str, ...] = program_field()


@command(RunOptions, cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
def run(options: RunOptions) -> Callable[[], int]:
    """Run a program unchanged inside a memory budget.

    Options after SCRIPT (or -m MODULE) are the program's own. Its output, exit code, signals and tracebacks are those
    of python SCRIPT. Models that fit are not changed; other models are planned and fitted at their first call.
    """
    from brim.run.script.run import run as launch
    from brim.run.script.script import Program

    target, arguments = program_of(options.module, options.arguments)
    program = Program(target=target, arguments=arguments, is_module=options.module is not None)
    settings = build(Settings, vars(options))
    if options.ram is not None:
        from brim.core.hardware import RAM
        from brim.measure.capacity import amount_bytes, check_room  # not for a program without a budget

        check_room(amount_bytes(options.ram, RAM))  # and again at the first model, with all that is loaded by then
    return lambda: launch(program, settings)
