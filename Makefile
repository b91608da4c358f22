# Every target does its own set-up: on a fresh clone with nothing installed, `make train` works.
#   make train ARGS="--stage 2 --devices 4 --steps 50 --out DIR"
# On a host with NVIDIA GPUs, CUDA wheels are installed too (CUDA=cuda13 for CUDA 13).

CUDA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda12)
ARGS ?=
RUN = .venv/bin/python -m
comma = ,
.PHONY: env train test test-full test-oldest bench h100 lint clean

env: .venv/installed

.venv/installed: pyproject.toml constraints.txt scripts/env.sh
	@sh scripts/env.sh .venv constraints.txt ".[dev$(if $(CUDA),$(comma)$(CUDA))]"
	@touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt scripts/env.sh
	@sh scripts/env.sh .venv-oldest constraints-oldest.txt ".[test]"
	@touch $@

# What compiling for GPUs that are not there needs: 0.5 GB more.
.venv/installed-aot: .venv/installed
	@sh scripts/env.sh .venv constraints.txt ".[dev,aot]"
	@touch $@

train: env
	@$(RUN) scripts.train $(ARGS)

test: env
	@$(RUN) pytest -m "not full" $(ARGS)

# The exhaustive products, about 25 minutes on 2 cores.
test-full: env
	@$(RUN) pytest -m full $(ARGS)

# The suite on the oldest JAX that is supported.
test-oldest: .venv-oldest/installed
	@.venv-oldest/bin/python -m pytest -m "not full" $(ARGS)

bench: env
	@$(RUN) scripts.bench $(ARGS)

# What the layer loops become on 8 H100s, compiled here.
h100: .venv/installed-aot
	@$(RUN) scripts.h100

lint: env
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/pyright

clean:
	rm -rf .venv .venv-oldest out dist
