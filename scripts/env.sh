#!/bin/sh
# Makes .venv with Python 3.12 or newer and installs this project into it, in the versions of
# constraints.txt. Argument: what to install, such as ".[dev]". Uses uv where it is installed.
set -eu
wanted="$1"

if command -v uv >/dev/null 2>&1; then
  [ -x .venv/bin/python ] || uv venv --quiet .venv
  exec uv pip install --quiet --python .venv/bin/python --constraint constraints.txt --editable "$wanted"
fi

if [ ! -x .venv/bin/python ]; then
  for python in python3.12 python3.13 python3.14 python3 python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      found="$python"
      break
    fi
  done
  if [ -z "${found:-}" ]; then
    echo "zerojax needs Python 3.12 or newer, and none is on the PATH (python3 is" \
      "$(python3 --version 2>&1 || echo missing)). Install Python 3.12, or install uv, which fetches it." >&2
    exit 1
  fi
  "$found" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
  --constraint constraints.txt --editable "$wanted"
