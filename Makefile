# Everything there is to run. `make help` lists the targets.
#
# Stamp files in .venv say what is done, so a warm run does only what changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
BIN := .venv/bin
TOOLS := .venv/.tools
# How the extension is built. Tests take `dev`, whose dependencies their own binaries share.
PROFILE ?= release
BUILT := .venv/.built-$(PROFILE)
RAY := .venv/.ray
CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
export PYO3_PYTHON := $(CURDIR)/.venv/bin/python
# Property tests draw the same cases in every run; SEED=... draws others.
SEED ?= 20261121
export PROPTEST_RNG_SEED := $(SEED)

RUST := $(shell find crates kernels -name target -prune -o -type f -print 2>/dev/null)
KERNELS := $(shell find kernels -name '*.h' -o -name '*.cu' -o -name '*.hip' 2>/dev/null)
# The oldest huggingface_hub that pyproject.toml admits, and the newest that was tried.
HUB_VERSIONS := 0.30.0 2.4.0
LIBRARIES := kie-kernels kie-kccl kie-core kie-server

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.PHONY: demo
demo: setup ## set everything up, build, stream a completion of the default model
	$(BIN)/kie run "def fibonacci(n):"

.PHONY: setup
setup: $(BUILT) ## make .venv, install the tools, build the extension into it

$(TOOLS): requirements-dev.txt
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust from rustup.rs"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	$(foreach v,$(HUB_VERSIONS),test -d .venv/hub/$(v) || $(BIN)/python -m pip install --quiet \
	    --no-warn-script-location --target .venv/hub/$(v) huggingface_hub==$(v);)
	touch $@

$(BUILT): $(TOOLS) $(RUST) Cargo.toml Cargo.lock pyproject.toml
	rm -f .venv/.built-*
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/maturin develop --profile $(PROFILE) --quiet
	touch $@

$(RAY): $(BUILT) requirements-ray.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt --requirement requirements-ray.txt
	touch $@

.PHONY: fmt
fmt: $(TOOLS) ## format Rust, Python and kernel sources in place
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(KERNELS),$(BIN)/clang-format -i $(KERNELS))

.PHONY: lint
lint: $(BUILT) ## formatters in check mode, clippy, ruff, pyright, the stub against the module
	cargo fmt --all --check
	$(if $(KERNELS),$(BIN)/clang-format --dry-run -Werror $(KERNELS))
	cargo clippy --workspace --all-targets --features kie-server/otlp --locked -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m mypy.stubtest kie._kie

.PHONY: test
test: ## everything that CI runs
	$(MAKE) -j2 $(TOOLS) tests-built
	$(MAKE) PROFILE=dev checks

# Needs none of the tools: they are installed meanwhile.
.PHONY: tests-built
tests-built:
	cargo test --workspace --features kie-server/otlp --locked --no-run

.PHONY: checks
checks: lint
	cargo test --workspace --features kie-server/otlp --locked
	cargo test --workspace --features kie-server/otlp --locked -- \
	    --ignored --test-threads=1 engine::tests grammar::tests
	$(CARGO_TARGET_DIR)/debug/examples/embed
	$(BIN)/python -m pytest --quiet
	$(BIN)/python tools/check_crates.py $(LIBRARIES)

.PHONY: test-portable
test-portable: ## what sleeps, wakes and polls, by the ways that every system has
	cargo test -p kie-kernels -p kie-core --lib --locked --features kie-core/portable -- \
	    park descriptor ring barrier stream team fork engine::tests

.PHONY: check-aarch64
check-aarch64: ## type-check all crates for aarch64, Linux and macOS, with Debian's rustc (downloads 300 MB)
	tools/check_aarch64.sh

# Schedules that `make sim` simulates: even ones with warps of 32, odd ones with warps of 64.
SEEDS ?= 6
.PHONY: sim
sim: ## the monokernel on every fixture, simulated: SEEDS=6 schedules, both warp widths
	SEEDS=$(SEEDS) cargo test -p kie-core --test monokernel --locked -- --nocapture every_fixture several_machines
	cargo test -p kie-core --test monokernel --locked -- --ignored every_mutant_of_entries every_mutant_of_mtp

.PHONY: gcn
gcn: ## machine code of gfx942 on our own emulator of it: fixtures, ranks, 500 schedules of weak memory
	LITMUS=500 cargo test -p kie-gcn --lib --locked
	cargo test -p kie-kccl --lib --locked gcn -- --include-ignored
	cargo test -p kie-core --test gcn --locked -- --include-ignored --nocapture
	cargo test -p kie-kernels --lib --locked entries_compile -- --ignored

# How long new cases are drawn, after those that were found before.
SECONDS ?= 600
.PHONY: attack
attack: setup ## hostile cases for ten minutes: SECONDS=600, SEED=...; findings go to tests/attack/corpus
	$(BIN)/python tests/attack --seconds $(SECONDS) --seed $(SEED)

.PHONY: gpu
gpu: setup ## on a GPU: every fixture, then speed beside the targets (DEVICE=cuda:0 FORCE_ARCH=80 REPORT=target/gpu-report.json)
	cargo test -p kie-kernels --lib --locked layers_with_entries -- --ignored
	KIE_CUDA_ARCH=$(FORCE_ARCH) $(BIN)/python benches/gpu/run.py --device $(or $(DEVICE),cuda:0) --exact \
	    --out $(or $(REPORT),target/gpu-report.json)

.PHONY: gpu-trust
gpu-trust: setup ## on a GPU: tokens repeat, neighbours, full memory, kills; ITEMS=memcheck, synccheck, racecheck
	$(BIN)/python benches/gpu/trust.py --device $(or $(DEVICE),cuda:0) \
	    $(or $(ITEMS),steady neighbours full killed)

.PHONY: gpu-encodings
gpu-encodings: ## on a GPU: what is stored quantised, against halves and against the CPU (cuda:0)
	cargo test --locked --test encodings -- --ignored --nocapture

.PHONY: bench-speculate
bench-speculate: setup ## what drafts of tokens are worth on the CPU
	$(BIN)/python benches/speculate.py --record

.PHONY: bench-interrupts
bench-interrupts: setup ## how long calls go on behind Ctrl-C and timeout=
	$(BIN)/python benches/interrupts.py

.PHONY: gpu-peers
gpu-peers: setup ## on a GPU: PyTorch's decode of the same shapes, compiled and graphed
	$(BIN)/python benches/gpu/peers.py

.PHONY: eval
eval: setup ## the default model writes small programs, which are run with tests: pass rates
	$(BIN)/python tools/demo_model/evaluate.py

.PHONY: bench
bench: setup ## decode latency of the default model on this machine
	$(BIN)/kie bench latency

.PHONY: bench-page
bench-page: setup ## frames of the playground in Chromium at 5,000 tokens a second
	$(BIN)/python benches/page.py

.PHONY: bench-session
bench-session: setup ## a session of 1,900 tokens to a file and back (50 ms at most)
	$(BIN)/python benches/session.py

.PHONY: bench-serve
bench-serve: setup ## what `kie serve` costs and bears over loopback (REQUESTS=10000)
	ulimit -n 8192; $(BIN)/python benches/serve.py --requests $(or $(REQUESTS),10000)

.PHONY: test-ray
test-ray: $(RAY) ## two replicas on Ray Serve, one of them killed (installs Ray)
	$(BIN)/pyright --project tests/ray --pythonpath $(BIN)/python
	RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest --quiet tests/ray

# Where the peers are installed: several GB, so not beside the tools.
PEERS ?= .venv/peers
.PHONY: bench-peers
bench-peers: setup ## CPU decode and prefill beside llama.cpp and transformers (installs them; slow)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet torch transformers gguf llama-cpp-python
	$(BIN)/python benches/peers.py --peers $(PEERS)/bin/python --record

.PHONY: docs
docs: setup ## build the manual into site/, rustdoc under site/rust
	$(BIN)/python -m pip install --quiet --requirement docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --no-deps --locked $(foreach l,$(LIBRARIES),-p $(l))
	rm -rf site/rust && cp -r $(CARGO_TARGET_DIR)/doc site/rust

.PHONY: wheel
wheel: $(TOOLS) ## build the wheel that ships (manylinux_2_28), check it in an empty environment
	$(BIN)/python -m pip install --quiet --requirement tools/wheel-requirements.txt
	rm -rf dist
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/maturin build --zig --compatibility manylinux_2_28 \
	    --profile dist --out dist --locked
	$(BIN)/auditwheel show dist/*.whl
	$(BIN)/python tools/check_wheel.py dist/*.whl

.PHONY: sdist
sdist: $(TOOLS) ## make the source archive, build it once without a network
	rm -rf dist/sdist && $(BIN)/maturin sdist --out dist/sdist
	cd dist/sdist && tar xzf kie-*.tar.gz && cd kie-*/ && CARGO_NET_OFFLINE=true \
	    $(CURDIR)/$(BIN)/maturin build --profile release --locked --compatibility off --out ..

.PHONY: clean
clean: ## remove what was built
	rm -rf .venv dist site target .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find python tests tools -name __pycache__ -prune -exec rm -rf {} +
