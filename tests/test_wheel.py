# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, and that it runs README's first snippet in an empty environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile

import pytest

from tests import ROOT
from tests.test_docs import README

CONSTRAINTS = ROOT / "constraints.txt"


def run(*command, cwd):
    """Output of a command that knows neither this checkout nor this environment."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS", "JAX_PLATFORMS")
    env = {name: x for name, x in os.environ.items() if name not in hidden}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_wheel_runs_the_first_snippet_in_an_empty_environment(tmp_path):
    """Needs a package index, as `make env` does, and about a minute."""
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert re.fullmatch(r"zerojax-[\d.]+-py3-none-any\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"zerojax"}
    assert "zerojax/py.typed" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "zerojax").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)

    run(python, "-m", "pip", "install", "--constraint", CONSTRAINTS, wheel, cwd=tmp_path)
    snippet = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    (tmp_path / "snippet.py").write_text(snippet)
    printed = run(python, "-W", "error", "snippet.py", cwd=tmp_path)
    assert "stage 3 over 8 devices" in printed
    assert float(re.search(r"^loss ([\d.]+), gradient norm", printed, re.MULTILINE)[1]) < 0.9
    assert "5. findings: none" in printed
    where = run(python, "-c", "import zerojax; print(zerojax.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
    assert "zerojax: " in run(python, "-m", "zerojax", cwd=tmp_path)
