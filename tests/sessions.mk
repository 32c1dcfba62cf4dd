# What CI and maintainers run besides the Makefile's targets: make -f tests/sessions.mk NAME

THIS := $(lastword $(MAKEFILE_LIST))
.DEFAULT_GOAL := sessions
include Makefile

.PHONY: sessions slow test-gpu test-driver test-driver-short test-driver-oldest test-engines test-flash-attn facts duel docs-output clients clean

sessions:
	@echo 'slow            list the slow tests, with the reasons'
	@echo 'test-gpu        the tests that need a GPU'
	@echo 'test-driver     the path of a GPU on a driver that records; 3 GB for the CUDA build of torch'
	@echo 'test-driver-short  what of it takes a minute: calls, kept calls, strides, launches, graphs, torch'\''s own calls'
	@echo 'test-driver-oldest the same with the oldest torch and Triton, and what it finds in its cache'
	@echo 'test-engines    the plugins of vLLM and SGLang, and the drop-in for xformers, with the classes of their sources; 0.5 GB'
	@echo 'test-flash-attn FlashAttention'\''s own tests of its functions, on ours; its source is 8 MB'
	@echo 'facts           what the compiler makes of the kernels that ship; TRITON=3.8.0 for another one'
	@echo '                FACTS=--check compares them with those that are committed'
	@echo 'duel            our machine code beside that of FlashAttention-3 and FlashAttention-4'
	@echo 'docs-output     run the commands whose output README and docs show, and rewrite it'
	@echo 'clients         run the tests that docs/clients.md names, which shows those that passed'
	@echo 'clean           remove the environment and what was built'

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
	@if $(PYTHON312) -c '' 2> /dev/null; then $(MAKE) -f $(THIS) $(OLDEST)/.tested; else \
	echo 'skipped: no Python 3.12 is found; make -f $(THIS) $@ PYTHON312=/path/to/python3.12'; fi

.PHONY: $(OLDEST)/.tested
$(OLDEST)/.tested: $(OLDEST)/.installed | $(CUDA_HEADERS)
	CXX='$(CXX)' $(OLDEST)/bin/python tests/driver/recording/build.py \
	$(OLDEST)/lib/python3.12/site-packages/torch $(CUDA_HEADERS)/nvidia/cu13/include $(RECORDING_OLDEST)
	@rm -rf $(RECORDING_OLDEST)/events && mkdir -p $(RECORDING_OLDEST)/events
	LD_LIBRARY_PATH=$(RECORDING_OLDEST) TRITON_LIBCUDA_PATH=$(RECORDING_OLDEST) \
	RECORDING_CUDA_LOG=$(RECORDING_OLDEST)/events/log OMP_NUM_THREADS=1 \
	$(OLDEST)/bin/python -m pytest tests/driver tests/cpu/kernels/test_signature.py tests/cpu/kernels/test_every_text.py

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
	$(ENGINE_TESTS) PYTHONPATH=$(call ENGINE_PATHS,xformers) $(BIN)/python -m pytest tests/engines/test_xformers.py
	$(ENGINE_TESTS) PYTHONPATH=$(CURDIR)/$(ENGINES)/vllm:$(call ENGINE_PATHS,sglang) $(BIN)/python -m pytest tests/engines/test_engine_kernels.py

$(ENGINES): | $(FOR_ALL)
	$(BIN)/python -m tests.engines.sources $@ || { rm -rf $@; exit 1; }

clients: $(FOR_ALL) $(RECORDING)/libcudart.so.13 | $(ENGINES)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients --run cpu
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients --run interpreted
	@rm -rf $(RECORDING)/events && mkdir -p $(RECORDING)/events
	$(DRIVER_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients --run driver
	for engine in vllm sglang xformers; do $(ENGINE_TESTS) \
	PYTHONPATH=$(CURDIR)/$(ENGINES)/$$engine:$(CURDIR)/$(ENGINES)/needed \
	$(BIN)/python -m tests.clients --run engines/test_$$engine || exit 1; done
	$(BIN)/python -m tests.docs_output clients.md

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

# Another Triton lies in a folder of its own, before the one of the environment.
facts: $(FOR_TUNING) $(if $(TRITON),$(VENV)/triton-$(TRITON))
	$(if $(TRITON),PYTHONPATH=$(VENV)/triton-$(TRITON)) $(BIN)/python benchmarks/sass_facts.py $(FACTS)

duel: $(FOR_ALL)
	$(BIN)/python benchmarks/machine_code.py
	$(BIN)/python benchmarks/machine_code_sm100.py

# Minutes of a core for the tuning runs.
docs-output: $(FOR_ALL)
	$(BIN)/python -m tests.support
	$(BIN)/python -m tests.docs_output
	$(BIN)/python -m tests.notebook

$(VENV)/triton-%: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

clean:
	rm -rf $(VENV) build dist *.egg-info
