"""``brim run`` beside ``python``: what a program sees of itself, and how it ends, is the same to the letter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from support.launching import hear_interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="exit by signals")
BRIM = [sys.executable, "-m", "brim", "run"]

WHAT_IT_SEES = """
    import os, sys
    main = sys.modules["__main__"]
    print(sorted(name for name in vars(main) if name not in ("main", "os", "sys")))
    print(__name__, __file__, __spec__ and __spec__.name, __package__, __doc__)
    print(type(__loader__).__name__, __builtins__)
    print(main.__dict__ is globals(), sys.argv, sys.path[0], sys.flags.safe_path, os.getcwd())
    print(sys.stdin.read(), os.environ["GIVEN"], sys.excepthook is sys.__excepthook__)
    import signal, warnings
    print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), warnings.showwarning.__module__)
"""
ENDINGS = {
    "nothing": "pass",
    "code": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('no')",
    "none": "raise SystemExit",
    "error": "def f():\n    raise ValueError('x')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('y') from e",
    "in handling": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('y')",
    "syntax": "x = (",
    "coding": "# -*- coding: latin-1 -*-\nx = '\\xe9'\nassert False, 'here'",
    "group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0], a[2].tb_frame.f_code.co_name)\n1 / 0",
    "failing hook": "import sys\ndef h(*a): raise OSError('h')\nsys.excepthook = h\n1 / 0",
    "atexit": "import atexit\natexit.register(print, 'last')\n1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(5)",
    "term": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()",
    "last": "import atexit, sys\natexit.register(lambda: print(sys.last_value))\n1 / 0",
    "brim's": "from brim.errors import BudgetError\nraise BudgetError('mine')",
    "warning": "import warnings; warnings.warn('w')",
    "import": "import not_there_at_all",
}


def both(arguments: list[str], folder: Path, *, options: tuple[str, ...] = (), python: tuple[str, ...] = ()) -> None:
    """Assert that python and brim run end alike."""
    environment = {**os.environ, "GIVEN": "something", "PYTHONDONTWRITEBYTECODE": "1"}
    found = []
    for command in ([sys.executable, *python], [sys.executable, *python, "-m", "brim", "run", *options]):
        done = subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env=environment,
            input="typed",
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=hear_interrupts,
        )
        found.append((done.returncode, done.stdout, done.stderr))
    assert found[1] == found[0]


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_as_under_python(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDINGS[ending], encoding="latin-1")
    both([str(script)], tmp_path)


@pytest.mark.parametrize("named", ["script.py", "./script.py", "sub/../script.py", "linked.py"])
def test_what_a_script_sees_of_itself(named: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "script.py").write_text(textwrap.dedent(WHAT_IT_SEES))
    (tmp_path / "sub" / "other.py").write_text(textwrap.dedent(WHAT_IT_SEES))
    (tmp_path / "linked.py").symlink_to(tmp_path / "sub" / "other.py")
    both([named, "a", "--ram", "-m", "--", "--help"], tmp_path, options=("--ram", "1GiB"))


def test_a_module_and_a_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    body = textwrap.dedent(WHAT_IT_SEES) + "\nfrom . import part\nassert __spec__.name.startswith('package')\n1 / 0\n"
    for name in ("__main__", "part_main"):
        (package / f"{name}.py").write_text(body)
    (package / "part.py").write_text("")
    for module in ("package", "package.part_main", "package.none", "nothing_of_the_kind"):
        both(["-m", module, "--lr", "3", "x"], tmp_path)


def test_a_folder_an_archive_and_a_compiled_file(tmp_path: Path) -> None:
    import py_compile
    import zipfile

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys\nprint(__name__, sys.argv, sys.path[0], __file__)\n1 / 0\n")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.write(folder / "__main__.py", "__main__.py")
    py_compile.compile(str(folder / "__main__.py"), str(tmp_path / "compiled.pyc"))
    for name in ("folder", "packed.zip", "compiled.pyc"):
        both([name, "a"], tmp_path)


def test_what_cannot_be_run_ends_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "package").mkdir()
    for name, text in (("empty.py", ""), ("damaged.py", "def f(:\n"), ("package/__init__.py", "")):
        (tmp_path / name).write_text(text)
    for arguments in (["empty_folder"], ["empty.py"], ["damaged.py"], ["-m", "damaged"], ["-m", "package"]):
        both(arguments, tmp_path)
    missing = [sys.executable, "missing.py"], [*BRIM, "missing.py"]
    codes = [subprocess.run(command, cwd=tmp_path, capture_output=True).returncode for command in missing]
    assert codes == [2, 2]


def test_a_safe_path_stays_safe(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(WHAT_IT_SEES))
    both(["script.py"], tmp_path, python=("-P",))


def test_processes_that_are_spawned_find_the_script_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import multiprocessing, sys
            def work(x):
                return x * x, __name__, "brim" in sys.modules
            if __name__ == "__main__":
                for kind in ("spawn", "fork", "forkserver"):
                    with multiprocessing.get_context(kind).Pool(2) as pool:
                        found = pool.map(work, range(3))
                        print(kind, [one[:2] for one in found], kind == "spawn" and found[0][2])
        """)
    )
    both(["script.py"], tmp_path)


def test_ctrl_c_kills_it_as_it_kills_python(tmp_path: Path) -> None:
    body = "import time, atexit\natexit.register(print, 'end')\nprint('go', flush=True)\ntime.sleep(30)\n"
    (tmp_path / "script.py").write_text(body)
    found = []
    for command in ([sys.executable], BRIM):
        with subprocess.Popen(
            [*command, "script.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_interrupts,
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "go\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            found.append((process.returncode, out, err))
    assert found[1] == found[0]
    assert found[0][0] == -signal.SIGINT


def test_nothing_heavy_is_imported_for_a_program_that_needs_nothing(tmp_path: Path) -> None:
    heavy = "{'torch', 'numpy', 'psutil', 'rich', 'brim.run.script.model_watch', 'brim.run.script.decide'}"
    (tmp_path / "script.py").write_text(f"import sys\nprint({heavy} & set(sys.modules))\n")
    done = subprocess.run([*BRIM, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
