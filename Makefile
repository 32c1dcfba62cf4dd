# make tune   on a fresh clone: installs flashgen here, and tunes for this GPU, or offline without one
# make test   on a fresh clone: installs what development needs, and runs the CPU suite

PYTHON ?= python3
TUNE ?=
PAPERS ?=
# nproc would answer with OMP_NUM_THREADS, where a shell has it.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)

VENV := .venv
BIN := $(VENV)/bin
FOR_TUNING := $(VENV)/.installed-tune
FOR_ALL := $(VENV)/.installed
FOR_DOCS := $(VENV)/.installed-docs
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Compiled anew by make check, for their facts: every direction and schedule of the backward, one head dim with
# a mask and, of descriptors, one without. facts FACTS=--check of tests/sessions.mk compares those of all kernels.
# make test compares those of Hopper's forward with head dim 128, causal, in bfloat16 without features, and make test-all of all.
CHECKED := bwd_d*_bf16_d64_causal_br* bwd_fused_bf16_d64_causal_br64_bc128_* bwd_*_bf16_d128_br*_tma* bwd_delta_bf16_d128_br128_*

# One thread a process: there are as many processes as cores, and one runs all tests of a file.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Processes that the tests start import bytecode, whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: help install tune test test-all lint format generate check docs papers release

help:
	@echo 'make install    install what development needs, into .venv'
	@echo 'make tune       install, and tune: for this GPU, or offline where there is none'
	@echo '                options of flashgen tune: make tune TUNE="--head-dim 128 --causal"'
	@echo 'make test       install, and run the CPU suite'
	@echo 'make test-all   the same with the slow tests and the recording driver'
	@echo 'make lint       ruff, mypy and import-linter'
	@echo 'make format     what ruff can do'
	@echo 'make generate   write generated/ from configs/ and templates/'
	@echo 'make check      say where generated/, quick outputs of docs/ or facts of some kernels are not what programs make today'
	@echo 'make docs       build the documentation site into build/site'
	@echo 'make papers     the claims of the FlashAttention papers, shown on this machine, into paper.html'
	@echo 'make release    build the wheel, and try it in an environment of its own'
	@echo 'make -f tests/sessions.mk sessions    what CI and maintainers run besides: GPUs, drivers, engines, other versions'

install: $(FOR_ALL)

tune: $(FOR_TUNING)
	$(BIN)/flashgen tune $(TUNE)
	@echo 'flashgen lies in $(BIN); to call it by its name: . $(BIN)/activate'

# Triton reads TRITON_INTERPRET once, when it is imported, so the interpreter has a run of its own. It prints the CPU
# time that it took, after the install; .ci/run says what that may be.
test: $(FOR_ALL)
	@$(BIN)/python tests/cpu_seconds.py \
	'$(PYTEST) -m "not slow" tests/cpu' \
	'TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/interpreted'

test-all: $(FOR_ALL) $(FOR_DOCS)
	$(PYTEST) tests/cpu
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreted
	$(MAKE) -f tests/sessions.mk test-driver

lint: $(FOR_ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(FOR_ALL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(FOR_TUNING)
	$(BIN)/flashgen generate

check: $(FOR_TUNING)
	$(BIN)/flashgen generate --check
	$(BIN)/python -m tests.docs_output --check
	$(BIN)/python benchmarks/machine_code.py --check
	$(BIN)/python benchmarks/machine_code_sm100.py --check
	$(BIN)/python benchmarks/sass_facts.py --check --jobs $(JOBS) $(CHECKED:%=--kernel '%')

docs: $(FOR_DOCS)
	$(BIN)/mkdocs build --strict
	@echo 'open build/site/index.html in a browser'

papers: $(FOR_TUNING)
	$(BIN)/python examples/papers $(PAPERS)

# Dates in the archives are those of the commit, so that two builds of it are equal. The wheel is made from the source distribution, and runs where nothing else is installed, in another folder.
EMPTY := $(CURDIR)/$(VENV)/release
TRY := import flashgen, torch; q = torch.randn(1, 2, 9, 16); flashgen.attention(q, q, q, causal=True); \
print("flashgen", flashgen.__version__, "from", flashgen.__path__[0], "digest", flashgen.digest()[:12])

release: $(FOR_ALL)
	rm -rf dist $(EMPTY)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet --disable-pip-version-check twine
	$(EMPTY)/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd $(EMPTY) && bin/python -c '$(TRY)'
	@echo "The first line of CHANGELOG.md's releases, the tag and dist/ must agree: git tag v$$(ls dist/*.whl | cut -d- -f2)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	"flashgen needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(FOR_TUNING): pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo 'Installing flashgen and what tuning needs into $(VENV): some minutes, most of them for torch'
	$(PIP_INSTALL) -e '.[tune,offline]'
	@touch $@

$(FOR_DOCS): pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(FOR_ALL): pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo 'Installing flashgen and what development needs into $(VENV): some minutes, most of them for torch'
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(FOR_TUNING) $@
