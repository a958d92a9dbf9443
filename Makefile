# `make demo` and `make test` need Python 3.11 and a C++ compiler, and make their own .venv once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo bench test check lint types package docs clean

demo: $(READY)  ## the main job: an MoE layer of LLaDA2.0-mini's size on real text
	$(BIN)/python examples/01_quickstart.py

test: $(READY)  ## the whole test suite; the second part with an NPU that is not there
	$(BIN)/pytest
	$(BIN)/pytest -p npu_moe_ops.virtual_npu.plugin tests/on_npu

bench: $(READY)  ## the experts of a layer on this CPU, beside other ways and the limits of the machine
	$(BIN)/python -m npu_moe_ops bench --plot bench.png

check: lint types package docs  ## everything that is not a test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

package: $(READY)  ## build wheel and sdist, try the wheel in an empty environment
	rm -rf dist
	$(BIN)/python -m build --quiet
	PYTHON=$(PYTHON) sh .ci/try-wheel dist/*.whl

docs: $(READY)  ## the site, into .site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file .mkdocs.yml

clean:
	rm -rf .venv .site dist

$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[dev]'
	PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m npu_moe_ops.virtual_npu --install
	touch $@
