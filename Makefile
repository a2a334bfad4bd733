# Run `make` for the targets. Everything lives in .venv: nothing outside the checkout is touched.

# The interpreter that .venv is made with.
PYTHON ?= python3
VENV ?= .venv
# The interpreter that runs things. Name one with jaxllm installed, and nothing is installed here:
# make test-gpu PY=python3
PY ?= $(VENV)/bin/python
# The CUDA kernels: AUTO builds them where nvcc is found, ON fails without nvcc, OFF leaves them out.
CUDA ?= AUTO
# JAX's GPU support, by the newest CUDA that the driver runs; `EXTRAS=` for none.
ifeq ($(origin EXTRAS),undefined)
EXTRAS := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA [A-Z ]*Version: *\([0-9]*\).*/\1/p' \
	| awk 'NR == 1 && $$1 >= 12 {print ($$1 >= 13) ? "cuda13" : "cuda12"}')
endif
# One more than CI's machine has cores: while a test waits for a process that it started, another runs.
PYTEST_WORKERS ?= 3
PYTEST_FLAGS ?=

# What depends most on JAX's version, in under two minutes. The longest comes first.
NEWEST_TESTS := 'tests/test_sharded.py::test_on_eight_devices[whole_arrays]' \
	tests/ops/test_contract.py::test_lowered_program_calls_the_kernels_of_its_backend \
	tests/models/test_gpt2.py tests/test_dispatch.py tests/test_versions.py tests/test_hoisting.py \
	tests/test_nn.py::test_vmap_matches_a_batch \
	tests/test_nn.py::test_layer_norm_takes_what_models_have \
	tests/test_training.py::test_in_place_adamw_matches_optax \
	tests/test_training.py::test_bfloat16_compute_keeps_float32_state

comma := ,
PIP := $(VENV)/bin/python -m pip
KERNEL_SOURCES := $(shell find cuda -name '*.cu*' -o -name '*.cc' -o -name '*.h') \
	$(wildcard examples/*/*.cu)

# An editable install with an extra, if PY is the one in .venv.
installed = $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.installed-$(1))

# What `make kernels` compiles for: every GPU that docs/architectures.md tells of.
ARCHS ?= 80 86 89 90 90a 100 103 120

.PHONY: help venv install demo test test-all test-gpu test-newest lint format bench kernels wheels \
	test-wheels docs clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

venv: $(VENV)/.created ## make .venv

install: $(call installed,train) ## install jaxllm into .venv, editable, with what training needs

demo: $(call installed,train) ## train a small GPT-2, sample from it, draw the loss
	$(PY) examples/pretrain_gpt2.py

test: $(call installed,test) ## run tests that cover all (tests/tiers.py); PYTEST_FLAGS adds options
	$(PY) -m pytest -n $(PYTEST_WORKERS) --covering $(PYTEST_FLAGS)

test-all: $(call installed,test) ## run all tests
	$(PY) -m pytest -n $(PYTEST_WORKERS) $(PYTEST_FLAGS)

test-gpu: $(call installed,test) ## run all tests on a GPU; only a kernel that declines it skips one
	$(PY) -m pytest -n 12 --dist loadgroup --require-gpu $(PYTEST_FLAGS)

test-newest: $(call installed,test) ## run the part of the tests that .ci/run runs on the newest JAX
	$(PY) -m pytest -n $(PYTEST_WORKERS) $(NEWEST_TESTS) $(PYTEST_FLAGS)

lint: $(VENV)/.installed-dev ## check formatting, lint and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/clang-format --dry-run -Werror $(KERNEL_SOURCES)
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.installed-dev ## format the sources
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(KERNEL_SOURCES)

bench: $(call installed,train) ## time the ops and the training step; needs a GPU
	for family in $$($(PY) -c 'from benchmarks.ops import families; print(*families())'); do \
	    $(PY) -m benchmarks.ops $$family || exit 1; done
	$(PY) -m benchmarks.train --implementation plain_unrolled torch_compile jaxllm

kernels: ## compile every kernel, and link none; ARCHS="80 120" says for which GPUs
	cuda/compile.sh $(ARCHS)

wheels: ## build the wheels of a release into dist/; needs Python 3.11 and 3.12
	cmake/wheels.sh

test-wheels: ## install the wheels in dist/ beside jax[cuda12] and jax[cuda13], and try them
	tests/install_wheels.sh dist/*.whl

docs: $(VENV)/.docs-tools ## build the documentation site into build/docs; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

clean: ## remove .venv, build products and caches; leaves data/ and runs/
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	    f"jaxllm needs Python >= 3.11, and this is {sys.version.split()[0]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	touch $@

# The site is built from the sources: jaxllm need not be installed.
$(VENV)/.docs-tools: $(VENV)/.created pyproject.toml
	$(PIP) install --quiet --group docs
	touch $@

# The install below builds against these, so that a second build is an incremental one. jaxlib is
# the one that will run: its FFI headers fit by definition.
$(VENV)/.build-tools: $(VENV)/.created pyproject.toml
	$(PIP) install --quiet "cmake>=3.24" "jaxlib>=0.10,<0.13" "nanobind>=2.9" "ninja>=1.11" \
	    "scikit-build-core>=0.11"
	touch $@

# Changes when an option does, and with it everything that was installed with the old one.
$(VENV)/.options: $(VENV)/.created FORCE
	@echo "$(CUDA) $(CUDAARCHS) $(EXTRAS)" | cmp -s - $@ || echo "$(CUDA) $(CUDAARCHS) $(EXTRAS)" > $@

# Editable: a change of a Python file needs no reinstall.
$(VENV)/.installed-%: $(VENV)/.build-tools $(VENV)/.options pyproject.toml CMakeLists.txt \
		$(wildcard cmake/*) $(KERNEL_SOURCES)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) install --quiet --no-build-isolation \
	    -C cmake.define.JAXLLM_CUDA=$(CUDA) -e ".[$*$(if $(EXTRAS),$(comma)$(EXTRAS))]"
	touch $@

.PRECIOUS: $(VENV)/.installed-%
FORCE:
