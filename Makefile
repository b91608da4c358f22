# Every target does its own set-up: on a fresh clone with nothing installed, `make train` works.
#   make train ARGS="--stage 2 --devices 4 --steps 50 --out DIR"
# On a host with NVIDIA GPUs, CUDA wheels are installed (CUDA=cuda13 for CUDA 13); elsewhere the part
# of them that compiling for GPUs needs.

CUDA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda12)
ARGS ?=
RUN = .venv/bin/python -m
.PHONY: env train plan audit test test-full test-oldest bench gpu-check docs lint clean

env: .venv/installed

.venv/installed: pyproject.toml constraints.txt scripts/env.sh
	@sh scripts/env.sh .venv constraints.txt ".[dev,$(or $(CUDA),aot)]"
	@touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt scripts/env.sh
	@sh scripts/env.sh .venv-oldest constraints-oldest.txt ".[test]"
	@touch $@

train: env
	@$(RUN) scripts.train $(ARGS)

# Which stage fits, and how fast, on GPUs that need not be here; default: llama2-7b on h100:8.
plan: env
	@$(RUN) scripts.plan $(ARGS)

test: env
	@$(RUN) pytest -n 2 --dist loadfile -m "not full" $(ARGS)

# The exhaustive products, about 25 minutes on 2 cores.
test-full: env
	@$(RUN) pytest -n 2 --dist loadfile -m full $(ARGS)

# The suite on the oldest JAX that is supported.
test-oldest: .venv-oldest/installed
	@.venv-oldest/bin/python -m pytest -n 2 --dist loadfile -m "not full" $(ARGS)

bench: env
	@$(RUN) scripts.bench $(ARGS)

# What only a GPU can show, in 8 minutes on a host with one: checks, and predicted beside measured.
gpu-check: env
	@$(RUN) scripts.gpu_check $(ARGS)

# The receipt of what `make train` would run; --target h100:8 compiles for GPUs that are not here.
audit: env
	@$(RUN) scripts.audit $(ARGS)

# The reference of the public names, from their docstrings: out/docs/zerojax.html.
docs: env
	@.venv/bin/python -W error -m pdoc --docformat google --no-show-source --template docs/template \
	  --output-directory out/docs zerojax '!zerojax[.]'

lint: env
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/pyright

clean:
	rm -rf .venv .venv-oldest .jax_cache out dist
