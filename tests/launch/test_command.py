from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from epl.launch.command import rank_command, rank_variables, write_shims
from epl.launch.options import Options


def test_variables() -> None:
    variables = rank_variables(Options(1, 3, Path("a.py")), {"PATH": "p"}, Path("s"), cores=8)
    assert variables == {
        "EPL_LAUNCH_NUM_WORKERS": "1",
        "EPL_LAUNCH_GPU_PER_WORKER": "3",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "2",
    }
    assert rank_variables(Options(4, 4, Path("a.py")), {}, Path("s"), cores=8)["OMP_NUM_THREADS"] == "1"
    shell = rank_variables(Options(1, 3, Path("a.sh")), {"PATH": "p", "OMP_NUM_THREADS": "5"}, Path("s"), cores=8)
    assert "OMP_NUM_THREADS" not in shell
    assert shell["PATH"] == "s:p"


def test_commands() -> None:
    assert rank_command(Options(1, 1, Path("a.sh"), ("x", "$y")))[-4:] == ["bash", "a.sh", "x", "$y"]
    assert rank_command(Options(1, 1, Path("d/a.py")))[-3] == sys.executable
    assert rank_command(Options(1, 1, Path("run")))[-1] == str(Path.cwd() / "run")


def test_python_inside_a_shell_script_is_ours(tmp_path: Path) -> None:
    write_shims(tmp_path)
    (tmp_path / "s.py").write_text("import sys; print(sys.prefix, sys.argv)")
    expected = f"{sys.prefix} ['s.py', 'a b']\n"
    for words in (["python", "s.py"], ["python3", "s.py"], ["python", "-u", "s.py"], ["python", "-B", "s.py"]):
        run = subprocess.run(
            [str(tmp_path / words[0]), *words[1:], "a b"], cwd=tmp_path, capture_output=True, text=True, timeout=20
        )
        assert (run.stdout, run.stderr) == (expected, "")
    code = "import sys; print(sys.prefix)"
    assert subprocess.check_output([tmp_path / "python", "-c", code], text=True) == f"{sys.prefix}\n"
