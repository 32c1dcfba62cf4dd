# make tune   on a fresh clone: installs flashgen here, and tunes for this GPU, or offline without one
# make test   on a fresh clone: installs what development needs, and runs the CPU suite

PYTHON ?= python3
TUNE ?=
# nproc would answer with OMP_NUM_THREADS, where a shell has it.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)

VENV := .venv
BIN := $(VENV)/bin
FOR_TUNING := $(VENV)/.installed-tune
FOR_ALL := $(VENV)/.installed
FOR_DOCS := $(VENV)/.installed-docs
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Compiled anew by make check, for their facts: every direction and schedule of the backward, one head dim with
# a mask and, of descriptors, one without. make facts FACTS=--check compares those of all kernels.
# make test compares those of Hopper's forward with head dim 128, causal, in bfloat16 without features, and make test-all of all.
CHECKED := bwd_d*_bf16_d64_causal_br* bwd_fused_bf16_d64_causal_br64_bc128_* bwd_*_bf16_d128_br*_tma* bwd_delta_bf16_d128_br128_*

# One thread a process: there are as many processes as cores, and one runs all tests of a file.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Processes that the tests start import bytecode, whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: help install tune test test-all slow test-gpu test-driver test-driver-short test-driver-oldest test-engines test-flash-attn lint format generate check facts duel docs docs-output release clean

help:
	@echo 'make install    install what development needs, into .venv'
	@echo 'make tune       install, and tune: for this GPU, or offline where there is none'
	@echo '                options of flashgen tune: make tune TUNE="--head-dim 128 --causal"'
	@echo 'make test       install, and run the CPU suite'
	@echo 'make test-all   the same with the slow tests'
	@echo 'make slow       list those, with the reasons'
	@echo 'make test-gpu   the tests that need a GPU'
	@echo 'make test-driver  the path of a GPU on a driver that records; 3 GB for the CUDA build of torch'
	@echo 'make test-driver-short  what of it takes a minute: calls, kept calls, strides, launches, graphs, torch'\''s own calls'
	@echo 'make test-engines  the plugins of vLLM and SGLang with the classes of their sources; 0.5 GB'
	@echo 'make test-flash-attn  FlashAttention'\''s own tests of its functions, on ours; its source is 8 MB'
	@echo 'make lint       ruff, mypy and import-linter'
	@echo 'make generate   write generated/ from configs/ and templates/'
	@echo 'make facts      what the compiler makes of the kernels that ship; TRITON=3.8.0 for another one'
	@echo '                FACTS=--check compares them with those that are committed'
	@echo 'make duel       our machine code beside that of FlashAttention-3 and FlashAttention-4; 250 MB'
	@echo 'make docs       build the documentation site into build/site'
	@echo 'make docs-output  run the commands whose output README and docs show, and rewrite it;'
	@echo '                a screenshot is taken again where its text has changed: needs Chromium'
	@echo 'make release    build the wheel, and try it in an environment of its own'
	@echo 'make check      say where generated/, quick outputs of docs/ or facts of some kernels are not what programs make today'

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
	$(MAKE) test-driver

slow: $(FOR_ALL)
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -q --why-slow tests/cpu tests/interpreted tests/driver

# The CUDA build of torch, without the libraries that it is linked against: tests/driver/recording
# stands in for them. Three equals signs, or pip takes the CPU build, whose version has a suffix.
TORCH_CUDA := $(VENV)/torch-cuda
CUDA_HEADERS := $(VENV)/cuda-headers
ENGINES := $(VENV)/engines
RECORDING := $(CURDIR)/build/driver
DRIVER_ENV := PYTHONPATH=$(CURDIR)/$(TORCH_CUDA):$(CURDIR)/$(ENGINES)/vllm:$(CURDIR)/$(ENGINES)/needed LD_LIBRARY_PATH=$(RECORDING) \
TRITON_LIBCUDA_PATH=$(RECORDING) RECORDING_CUDA_LOG=$(RECORDING)/events/log

test-driver: DRIVER_TESTS := tests/driver
test-driver-short: DRIVER_TESTS := -m "not slow" $(patsubst %,tests/driver/test_%.py,attention graphs kept_call launches odd_strides torch_flash)

test-driver test-driver-short: $(FOR_ALL) $(RECORDING)/libcudart.so.13
	@rm -rf $(RECORDING)/events && mkdir -p $(RECORDING)/events
	$(DRIVER_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(DRIVER_TESTS)

$(RECORDING)/libcudart.so.13: $(wildcard tests/driver/recording/*) | $(TORCH_CUDA) $(CUDA_HEADERS)
	CXX='$(CXX)' $(BIN)/python tests/driver/recording/build.py \
	$(TORCH_CUDA)/torch $(CUDA_HEADERS)/nvidia/cu13/include $(RECORDING)

# The same with the oldest torch and Triton, where Python 3.12 is found.
PYTHON312 ?= python3.12
OLDEST := $(VENV)/oldest
RECORDING_OLDEST := $(CURDIR)/build/driver-oldest

test-driver-oldest:
	@if $(PYTHON312) -c '' 2> /dev/null; then $(MAKE) $(OLDEST)/.tested; else \
	echo 'skipped: no Python 3.12 is found; make $@ PYTHON312=/path/to/python3.12'; fi

.PHONY: $(OLDEST)/.tested
$(OLDEST)/.tested: $(OLDEST)/.installed | $(CUDA_HEADERS)
	CXX='$(CXX)' $(OLDEST)/bin/python tests/driver/recording/build.py \
	$(OLDEST)/lib/python3.12/site-packages/torch $(CUDA_HEADERS)/nvidia/cu13/include $(RECORDING_OLDEST)
	@rm -rf $(RECORDING_OLDEST)/events && mkdir -p $(RECORDING_OLDEST)/events
	LD_LIBRARY_PATH=$(RECORDING_OLDEST) TRITON_LIBCUDA_PATH=$(RECORDING_OLDEST) \
	RECORDING_CUDA_LOG=$(RECORDING_OLDEST)/events/log OMP_NUM_THREADS=1 \
	$(OLDEST)/bin/python -m pytest tests/driver

$(OLDEST)/.installed:
	$(PYTHON312) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --no-deps torch===2.11.0 triton==3.6.0
	$(OLDEST)/bin/python -m pip install --quiet filelock typing-extensions 'setuptools<82' sympy networkx \
	jinja2 fsspec numpy pyyaml pytest pytest-timeout typer rich optuna scipy hypothesis numba nvidia-ml-py
	@touch $@

$(TORCH_CUDA): | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
	"torch===$$(sed -n 's/^torch==//p' constraints.txt)"

$(CUDA_HEADERS): | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
	nvidia-cuda-runtime==13.0.96

# The sources of engines, without their extensions and without the torch that their wheels pin. An empty list of devices
# lets vLLM define its Triton kernels where there is no GPU.
ENGINE_TESTS := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TRITON_INTERPRET=1
ENGINE_PATHS = $(CURDIR)/$(ENGINES)/$(1):$(CURDIR)/$(ENGINES)/needed

test-engines: $(FOR_ALL) | $(ENGINES)
	$(ENGINE_TESTS) PYTHONPATH=$(call ENGINE_PATHS,vllm) $(BIN)/python -m pytest tests/engines/test_vllm.py
	$(ENGINE_TESTS) PYTHONPATH=$(call ENGINE_PATHS,sglang) $(BIN)/python -m pytest tests/engines/test_sglang.py
	$(ENGINE_TESTS) PYTHONPATH=$(CURDIR)/$(ENGINES)/vllm:$(call ENGINE_PATHS,sglang) $(BIN)/python -m pytest tests/engines/test_engine_kernels.py

$(ENGINES): | $(FOR_ALL)
	$(BIN)/python -m tests.engines.sources $@ || { rm -rf $@; exit 1; }

# FlashAttention's own tests of its public functions, from its source distribution, on ours.
SUITES := $(VENV)/suites
SUITE := OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=$(SUITES) $(BIN)/python -m tests.flash_attn_suite \
$(SUITES)/flash_attn-2.8.3.tar.gz --tb short

test-flash-attn: $(FOR_ALL) $(SUITES)/flash_attn-2.8.3.tar.gz
	$(SUITE) --cases 10
	FLASHGEN_GPU=nvidia_a100_sxm4_80gb $(SUITE) --cases 6

$(SUITES)/flash_attn-2.8.3.tar.gz: | $(FOR_ALL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SUITES) einops==0.8.2
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip download --quiet --no-deps --no-build-isolation \
	--no-binary flash-attn --dest $(SUITES) flash-attn==2.8.3

# One process: what is timed and what fills the memory must be alone on the GPU.
test-gpu: $(FOR_ALL)
	$(BIN)/python -m pytest tests/gpu

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

# Another Triton lies in a folder of its own, before the one of the environment.
facts: $(FOR_TUNING) $(if $(TRITON),$(VENV)/triton-$(TRITON))
	$(if $(TRITON),PYTHONPATH=$(VENV)/triton-$(TRITON)) $(BIN)/python benchmarks/sass_facts.py $(FACTS)

# Packages and cubins go to .peers, which git ignores.
duel: $(FOR_ALL)
	$(BIN)/python benchmarks/machine_code.py
	$(BIN)/python benchmarks/machine_code_sm100.py

docs: $(FOR_DOCS)
	$(BIN)/mkdocs build --strict
	@echo 'open build/site/index.html in a browser'

# Half an hour of a core for the tuning runs and the search benchmark.
docs-output: $(FOR_ALL)
	$(BIN)/python -m tests.support
	$(BIN)/python -m tests.docs_output
	$(BIN)/python -m tests.notebook
	$(BIN)/python benchmarks/search_efficiency.py --jobs $(JOBS) --out benchmarks/results/search_efficiency

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

$(VENV)/triton-%: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

clean:
	rm -rf $(VENV) build dist *.egg-info

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
