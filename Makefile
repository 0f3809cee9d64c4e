# Each target first makes .venv with what it needs, once, and again when pyproject.toml or constraints.txt changed.
#   make demo      see it work, on this machine, in under a minute after the installation
#   make test      every test but the grid of faults; those that need root say why they are skipped without it. Most run
#                  four at a time, those of an xdist_group in one process, which starts their workers once; those that
#                  measure this machine run one by one after them, whether they passed or not
#   make test-all  the same with the frameworks of evenstep.integrations and the trackers installed; make test skips their
#                  tests, with the reason, where they are absent. Then tests/frameworks for each of FRAMEWORKS, in an
#                  environment of its own (.venv-jax by constraints-jax.txt, for one), with the parameter servers of
#                  .venv, since they need torch; MXNet needs Python 3.11. .ci/run calls this one, with a part of
#                  FRAMEWORK_TESTS: all of them take twenty minutes more
#   make faults    every cell of the grid of faults, some at a time, for about half an hour; writes docs/faults.md
#   make gpu       what only a CUDA device can show, with records in benchmarks/results; needs one device, and no network
#   make check     formatting, lint, types, import contracts, and whether the figures in documents come from the present code
#   make docs      the site of the documentation, in build/docs; a broken link is an error
#   make dist      the wheel and the source distribution, in dist/, looked over as the package index does
#   make clean     remove what the targets above have made, .venv too
#
# torch: constraints.txt fixes the release, pip's configuration decides the build. Where pip knows an index or a folder
# with the CPU wheel of that release, pip prefers it (0.2 GB); elsewhere it takes the index's own wheel, which on Linux
# brings the CUDA libraries (2.7 GB). To have the small one there, name PyTorch's CPU index in PIP_EXTRA_INDEX_URL.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEMO := $(VENV)/.installed-demo
INSTALLED_ALL := $(VENV)/.installed-all
FRAMEWORKS := jax tensorflow mxnet flower
INSTALLED_FRAMEWORKS := $(FRAMEWORKS:%=.venv-%/.installed)
FRAMEWORK_TESTS := tests/frameworks
TESTED_WITH_jax := flax optax
TESTED_WITH_tensorflow := tensorflow-cpu
TESTED_WITH_flower := flwr[simulation]

.DELETE_ON_ERROR:
.PHONY: demo test test-all faults gpu check docs dist clean

demo: $(INSTALLED_DEMO)
	$(BIN)/evenstep demo

# Hundreds of processes import evenstep, which need not compile it each, whatever the environment says of others.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	@trap 'exit 130' INT; \
	$(BIN)/python -m pytest -m "not alone and not faults" --numprocesses 4 --dist loadgroup; beside=$$?; \
	$(BIN)/python -m pytest -m alone; alone=$$?; \
	echo "pytest's exit codes, 0 where all passed: $$beside of tests beside each other, $$alone of tests alone"; \
	test $$beside -eq 0 -a $$alone -eq 0

test-all: $(INSTALLED_ALL) $(INSTALLED_FRAMEWORKS)
	$(MAKE) test
	@set -e; for name in $(FRAMEWORKS); do TORCH_PYTHON=$(BIN)/python .venv-$$name/bin/python -m pytest $(FRAMEWORK_TESTS) \
		-m "not faults" --numprocesses 3 --dist loadgroup; done

faults: $(INSTALLED) $(INSTALLED_FRAMEWORKS)
	$(BIN)/python -m pytest tests/faults --all-faults --fault-table docs/faults.md --numprocesses 5
	@set -e; for name in $(FRAMEWORKS); do TORCH_PYTHON=$(BIN)/python .venv-$$name/bin/python -m pytest \
		tests/frameworks -k a_fault_of_one --fault-table docs/faults.md --numprocesses 2; done

gpu: $(INSTALLED)
	$(BIN)/python benchmarks/gpu.py

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/check_rooms.py
	$(BIN)/python benchmarks/check_records.py

docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv-publish/.installed
	.venv-publish/bin/mkdocs build --site-dir build/docs
	@echo "The site is in build/docs: python3 -m http.server --directory build/docs"

dist: .venv-publish/.installed
	rm -rf dist
	.venv-publish/bin/python -m build
	.venv-publish/bin/twine check --strict dist/*

$(INSTALLED): $(INSTALLED_DEMO)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(INSTALLED_ALL): $(INSTALLED)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[lightning,accelerate,trl,ray,opentelemetry,torchft]' wandb webdataset torchdata kubernetes-validate
	@touch $@

.venv-publish/.installed: constraints-publish.txt
	$(PYTHON) -m venv .venv-publish
	.venv-publish/bin/python -m pip install --constraint constraints-publish.txt --editable . build latex2mathml \
		mdx-truly-sane-lists mkdocs-material 'mkdocstrings[python]' ruff twine
	@touch $@

.venv-%/.installed: pyproject.toml constraints-%.txt $(INSTALLED_DEMO)
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --constraint constraints-$*.txt --editable '.[$*]' $(TESTED_WITH_$*:%='%') \
		hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

$(INSTALLED_DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo 'evenstep needs Python 3.11 or newer, and "$(PYTHON)" is not: say which, as in make PYTHON=python3.12' >&2; \
	exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[torch]'
	@touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS:%=.venv-%) .venv-publish build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +
