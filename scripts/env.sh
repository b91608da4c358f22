#!/bin/sh
# Makes a virtual environment with Python 3.12 or newer and installs this project into it.
#   sh scripts/env.sh .venv constraints.txt ".[dev]"
# The versions are those of the constraints file. Uses uv where it is installed.
set -eu
venv="$1" constraints="$2" wanted="$3"

if command -v uv >/dev/null 2>&1; then
  [ -x "$venv/bin/python" ] || uv venv --quiet "$venv"
  exec uv pip install --quiet --python "$venv/bin/python" --constraint "$constraints" \
    --editable "$wanted"
fi

if [ ! -x "$venv/bin/python" ]; then
  for python in python3.12 python3.13 python3.14 python3 python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      found="$python"
      break
    fi
  done
  if [ -z "${found:-}" ]; then
    echo "zerojax needs Python 3.12 or newer, and the PATH has none (python3 is" \
      "$(python3 --version 2>&1 || echo missing))." \
      "Install Python 3.12, or install uv, which fetches it." >&2
    exit 1
  fi
  "$found" -m venv "$venv"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  --constraint "$constraints" --editable "$wanted"
