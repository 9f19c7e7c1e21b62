"""Each test runs a script plainly and through entry.py, and expects the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epl.launch.command import ENTRY

from .conftest import Write


def run(*words: object, cwd: Path, error_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if error_file:
        environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=30
    )


def both(script: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    plain, ours = run(script, *args, cwd=cwd), run(ENTRY, script, *args, cwd=cwd)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    return ours


def test_the_script_cannot_tell_the_difference(write: Write, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(
        "sub/script.py",
        '''
        """Doc."""
        import pickle, sys, failure, inspect, atexit, threading
        class Thing: pass
        print(__name__, __file__, __doc__, __spec__, __package__, sorted(globals()))
        print(sys.argv, sys.path, sorted(m for m in sys.modules if "entry" in m and "points" not in m))
        print(type(pickle.loads(pickle.dumps(Thing()))).__module__, sys.modules["__main__"].Thing is Thing)
        print(inspect.getsource(Thing), failure.mine)
        atexit.register(lambda: print("at exit", Thing, sys.modules["__main__"].Thing is Thing))
        threading.Thread(target=lambda: (__import__("time").sleep(0.05), print("thread", Thing))).start()
        ''',
    )
    write("sub/failure.py", "mine = True")  # the name of a module of ours
    out = both("sub/script.py", "a b", "--c", cwd=tmp_path).stdout
    assert "['sub/script.py', 'a b', '--c']" in out
    assert "at exit" in out


def test_multiprocessing_spawn_finds_the_script(write: Write, tmp_path: Path) -> None:
    write(
        "script.py",
        """
        import multiprocessing
        def work(x): return x + 1
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [1, 2]))
        """,
    )
    assert both("script.py", cwd=tmp_path).stdout == "[2, 3]\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f():\n    raise ValueError('boom')\nf()", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e", 1),
        ("x = (\n", 1),
        ("import sys\nsys.exit(3)", 3),
        ("import sys\nsys.exit('a message')", 1),
        ("import sys\nsys.exit()", 0),
        ("import sys\nsys.excepthook = lambda *a: print('hook', a[1])\nraise ValueError('boom')", 1),
    ],
)
def test_ends_are_those_of_plain_python(write: Write, tmp_path: Path, text: str, code: int) -> None:
    write("script.py", text)
    assert both("script.py", cwd=tmp_path).returncode == code
    error_file = tmp_path / "error.json"
    run(ENTRY, "script.py", cwd=tmp_path, error_file=error_file)
    assert error_file.exists() == (code != 0)


def test_the_record_has_no_frame_of_ours(write: Write, tmp_path: Path) -> None:
    write("script.py", "raise ValueError('boom')")
    run(ENTRY, "script.py", cwd=tmp_path, error_file=tmp_path / "error.json")
    text = (tmp_path / "error.json").read_text()
    assert "script.py" in text
    assert "entry.py" not in text
