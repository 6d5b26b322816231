# `make help` lists the targets. Each target installs what it needs into an environment .venv-NAME (environments/NAME.txt has its pinned
# requirements). Its file `stamp` is newer than its requirements once it is complete.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(PYTHON) tools/install.py

PROJECTS := pyproject.toml $(sort $(wildcard libs/*/pyproject.toml plugins/*/pyproject.toml))

# Not exported for all targets: `make run` may download a model, and `make bench` measures with OpenMP as it is.
OFFLINE := HF_HUB_OFFLINE=1
PYTEST_ENV := $(OFFLINE) OMP_WAIT_POLICY=PASSIVE
in = $(PYTEST_ENV) .venv$(1:%=-%)/bin/python -m# $(call in,ray) pytest tests/ray
define newline


endef
BY_FILE := --dist loadfile --no-loadscope-reorder
PYTEST := $(call in) pytest $(BY_FILE) $(if $(COLD),,--warm)

ROLE_TESTS := $(wildcard tests/e2e/test_roles*.py)
API_TESTS := plugins/trajectory_api/tests $(wildcard tests/e2e/test_api_*.py)
AGENT_TESTS := plugins/agent_api/tests $(wildcard tests/e2e/test_agent_*.py) tests/e2e/test_serve_agent.py
FEW_BITS_TESTS := tests/e2e/test_quantize.py $(wildcard plugins/*/tests/test_quantization.py) plugins/trainer_grpo/tests/test_torchao.py \
  plugins/trainer_grpo/tests/test_compiled_layers.py
OWN_TARGET := $(addprefix tests/,slurm machines kubernetes gpu pages real models tinker) plugins/simulation/tests/test_pages.py $(ROLE_TESTS) $(API_TESTS) \
  $(AGENT_TESTS) $(FEW_BITS_TESTS)
ROLL := roll$(if $(ROLL_SOURCE),-source)
SWEEP := $(if $(ATROPOSLIB_SOURCE),.venv-environments/stamp)

# If this is set, each of the thousand processes that the tests start compiles all of our modules again (0.25 s of CPU each).
unexport PYTHONDONTWRITEBYTECODE

TARGETS := $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))
.PHONY: $(TARGETS)

run: .venv/run.stamp ## train the tiny policy (installs into .venv first)
	$(BIN)/atropos run --bridge ipc --env gsm8k

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name text; do printf '%-22s %s\n' "$$name" "$$text"; done

# --- tests in .venv ---

test: .venv/test.stamp ## lint, and the tests of core and most plugins; COLD=1 starts each process anew
	+$(MAKE) -j 2 lint tests
quick: .venv/test.stamp ## the same without slow test files (tests/seconds.json): a minute
	+$(MAKE) -j 2 lint quick-tests

# Eight at a time, also on two cores: more than half of the time is waiting for servers, kills and deadlines.
tests: .venv/test.stamp ## the tests of `make test`
	$(PYTEST) -n 8 $(addprefix --ignore ,$(OWN_TARGET))
quick-tests: .venv/test.stamp ## the tests of `make quick`
	$(PYTEST) -n 2 --quick
lint: .venv/test.stamp ## ruff, mypy --strict, import-linter, and a count of prose that reads as translated
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.prose
test-pages: .venv/test.stamp ## every example of the README and of docs/: two minutes
	$(PYTEST) -n 4 tests/pages plugins/simulation/tests/test_pages.py
test-roles: .venv/test.stamp ## server, engines, workers and trainer started separately, with kills: three minutes
	$(PYTEST) -n 2 $(ROLE_TESTS)
test-trajectory-api: .venv/test.stamp ## the trajectory API: server, journal, clients, hostile input, kills, load: two minutes
	$(PYTEST) -n 4 $(API_TESTS)
test-agent-api: .venv/test.stamp ## the agents' API, its sandboxes, and runs whose rollouts are programs: two minutes
	$(PYTEST) -n 4 $(AGENT_TESTS)
test-machines: .venv/test.stamp ## several machines and Kubernetes pods, as network namespaces of this one: three minutes
	$(PYTEST) -n 2 tests/machines tests/kubernetes
test-gpu: .venv/test.stamp .venv-triton/stamp ## the checks of `make gpu` on a CPU, and weights in fewer bits (needs a C++ compiler): three minutes
	TRITON_PYTHON=.venv-triton/bin/python $(PYTEST) -n 4 tests/gpu $(FEW_BITS_TESTS)
test-models: .venv/test.stamp ## every family of models as a tiny one: trained exactly, killed, resumed, exported, or refused: eight minutes
	$(PYTEST) -n 2 tests/models
test-models-short: .venv/test.stamp ## one family for each way to compute: three minutes
	$(PYTEST) -n 2 tests/models -k "refused or [qwen3] or [gpt_oss] or [deepseek_v3] or [qwen3_5_text] or [lfm2] or [mamba2]"
test-slurm: .venv/test.stamp slurm ## runs as jobs of a real Slurm, with kills: ten minutes
	$(call in) pytest tests/slurm
test-slurm-short: .venv/test.stamp slurm ## the contract in a job, a killed role, and refusals
	$(call in) pytest tests/slurm -k "contract or trainer] or refuse or submit_submits"
slurm: ## install Slurm's daemons if they are missing
	@command -v slurmctld || [ -x /usr/sbin/slurmctld ] || { [ "$$(id -u)" = 0 ] && apt-get update -q && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends slurmctld slurmd slurm-client munge; } || \
	  (echo "these tests need Slurm's daemons: install your system's packages slurmctld, slurmd, slurm-client and munge"; false)
test-pythons: .venv/test.stamp ## the quick tests on Python 3.12 and 3.13, if they are installed
	$(BIN)/python -m tools.other_pythons 3.12 3.13
test-pythons-short: .venv/test.stamp ## only what differs between Pythons, on 3.13: two minutes
	$(BIN)/python -m tools.other_pythons --short 3.13

# --- tests with other people's packages ---

environments: $(patsubst %,.venv-%/stamp,view atroposlib real roll worlds ray skyrl agents agents-node tinker tinker-newest trl docs verifiers-v0 verifiers-v1 vllm) ## install the environments that .ci/run needs
	$(BIN)/python -m tools.other_pythons --install 3.13
vllm: .venv-vllm/stamp ## install vLLM into .venv-vllm (2 GB)

test-vllm: .venv-vllm/stamp .venv-real/stamp .venv-triton/stamp .venv-tinker/stamp ## real vLLM servers: a quarter of an hour
	REAL_PYTHON=.venv-real/bin/python TRITON_PYTHON=.venv-triton/bin/python TINKER_PYTHON=.venv-tinker/bin/python \
	  $(call in,vllm) pytest tests/vllm -n 2 $(BY_FILE)
test-vllm-short: .venv-vllm/stamp ## each bridge with one family of models, a kill and a planted fault: four minutes
	$(call in,vllm) pytest $(patsubst %,tests/vllm/test_%.py,engine engine_role sleep_mode bridge_ipc bridge_lora bridge_checkpoint kills gpu_checks) \
	  -n 2 $(BY_FILE) -k "not qwen and not server and not core and not trainer] and not adapters_that and not another_check"
test-atroposlib: .venv/test.stamp .venv-atroposlib/stamp ## the trajectory API with the clients and the server of atroposlib 0.4.0: two minutes
	$(PYTEST_ENV) ATROPOSLIB_PYTHON=.venv-atroposlib/bin/python $(BIN)/python -m pytest -n 2 $(BY_FILE) tests/atroposlib tests/pages/test_their_names.py
test-environments: .venv/test.stamp $(SWEEP) ## environment files of atroposlib's shapes; ATROPOSLIB_SOURCE=CHECKOUT adds its own files
	$(PYTEST) -n 2 plugins/env_atroposlib/tests
	$(if $(SWEEP),.venv-environments/bin/python -m benchmarks.atroposlib_environments,@echo "ATROPOSLIB_SOURCE names no checkout: the 119 files of atroposlib were not tried")
test-roll: .venv-$(ROLL)/stamp ## our environments in gem and in a Ray actor; ROLL_SOURCE=CHECKOUT adds ROLL's own classes: two to four minutes
	$(call in,$(ROLL)) pytest tests/roll plugins/adapter_roll/tests
test-skyrl: .venv-skyrl/stamp ## our environments inside SkyRL's trainer, on a CPU; SKYRL_SOURCE=CHECKOUT uses that SkyRL: three minutes
	$(if $(SKYRL_SOURCE),PYTHONPATH=$(SKYRL_SOURCE):$(SKYRL_SOURCE)/skyrl-gym) $(call in,skyrl) pytest tests/skyrl plugins/adapter_skyrl tests/pages/test_their_names.py
test-worlds: .venv-worlds/stamp ## environments of reasoning-gym, gem, TextArena and OpenEnv, trained for five steps: ten minutes
	$(call in,worlds) pytest tests/worlds $(wildcard $(patsubst %,plugins/env_%/tests,gem reasoning_gym textarena verifiers)) -n 2
test-worlds-short: .venv-worlds/stamp ## only the training
	$(call in,worlds) pytest tests/worlds -n 2 -k trains
test-verifiers: .venv-verifiers-v0/stamp .venv-verifiers-v1/stamp ## environments of both contracts of verifiers: five minutes
	$(foreach one,v0 v1,$(call in,verifiers-$(one)) pytest tests/verifiers plugins/env_verifiers/tests -n 2$(newline))
test-verifiers-short: .venv-verifiers-v0/stamp .venv-verifiers-v1/stamp ## only the training
	$(foreach one,v0 v1,$(call in,verifiers-$(one)) pytest tests/verifiers -n 2 -k trains$(newline))
test-ray: .venv-ray/stamp ## runs on a Ray cluster of simulated machines, with kills and scaling: eleven minutes
	$(call in,ray) pytest tests/ray plugins/launcher_ray/tests
test-ray-short: .venv-ray/stamp ## the same weights as without Ray, a killed trainer, worker and server, and refusals
	$(call in,ray) pytest tests/ray plugins/launcher_ray/tests -k "not lost and not stays and not engine] and not become and not random and not as_soon and not machine_of and not over_two"

# The environments of the clients hold nothing of ours: they only speak HTTP.
test-agents: .venv/test.stamp ## real clients of the agents' API (codex, opencode, ...), each in a process; needs Node 20: five minutes
	+$(MAKE) -j 3 .venv-agents/stamp .venv-agents-pinned/stamp .venv-agents-node/stamp
	$(OFFLINE) AGENT_CLIENTS=.venv-agents:.venv-agents-pinned:.venv-agents-node $(BIN)/python -m pytest tests/agents -n 2
test-agents-short: .venv/test.stamp ## without the clients that need pinned packages
	+$(MAKE) -j 2 .venv-agents/stamp .venv-agents-node/stamp
	$(OFFLINE) AGENT_CLIENTS=.venv-agents:.venv-agents-node $(BIN)/python -m pytest tests/agents -n 2
test-export: .venv/test.stamp .venv-trl/stamp ## exported data sets in TRL's own trainers: two minutes
	$(PYTEST_ENV) TRL_PYTHON=.venv-trl/bin/python $(BIN)/python -m pytest tests/trl
TINKER := TINKER_PYTHON=.venv-tinker/bin/python NEWEST_TINKER_PYTHON=.venv-tinker-newest/bin/python $(PYTEST) -n 2
test-tinker: .venv/test.stamp .venv-tinker/stamp .venv-tinker-newest/stamp ## the official client of Tinker against `atropos tinker`: every call, kills, eight clients at once, and `atropos run` with it: eight minutes
	$(TINKER) tests/tinker
test-tinker-short: .venv/test.stamp .venv-tinker/stamp .venv-tinker-newest/stamp ## every call, also by the newest client; gradients; a server that is killed again and again
	$(TINKER) $(patsubst %,tests/tinker/test_%.py,every_call gradients newest kills) -k "not kills or again_and_again"
test-mlflow: .venv/test.stamp .venv-mlflow/stamp ## the sink mlflow with a server that is killed
	$(PYTEST_ENV) MLFLOW_PYTHON=.venv-mlflow/bin/python $(BIN)/python -m pytest tests/mlflow
REAL := $(PYTEST_ENV) REAL_PYTHON=.venv-real/bin/python TRL_PYTHON=.venv-trl/bin/python $(BIN)/python -m pytest
test-real: .venv/test.stamp .venv-real/stamp .venv-trl/stamp ## a pretrained model, SmolLM2-135M: weights, tokens, logprobs and gradients next to those of other libraries; runs over each bridge, one killed; export, tools, agents, diagnoses: ten minutes
	$(REAL) tests/real
test-real-short: .venv/test.stamp .venv-real/stamp ## weights, tokens, logprobs and gradient; a run with LoRA, and its export: three minutes
	$(REAL) $(patsubst %,tests/real/test_%.py,model engine update bridges export) -k "not bridges or lora"
test-view: .venv-view/stamp ## the viewer's page in Chromium: three minutes
	$(call in,view) pytest tests/view

# --- packages, pages, releases ---

dist: .venv/test.stamp ## a wheel and a source distribution of each package, in dist/
	rm -rf dist
	$(BIN)/python -m tools.dist dist
test-dist: dist ## pip installs the wheels into a clean environment, uv a checkout, and a policy trains in each: five minutes
	DIST=dist $(BIN)/python -m pytest tests/dist
site: .venv/test.stamp .venv-docs/stamp ## docs/, the READMEs and a reference made from the code, in build/site/site; a broken link fails
	rm -rf build/site
	$(BIN)/python -m tools.make_site build/site
	cd build/site && NO_MKDOCS_2_WARNING=1 ../../.venv-docs/bin/mkdocs build --quiet --strict
	@echo "the site is in build/site/site: open index.html"
test-site: site .venv-view/stamp ## that site in Chromium, without a network: a minute
	SITE=build/site/site .venv-view/bin/python -m pytest tests/site
screenshots: .venv/run.stamp .venv-view/stamp ## the pictures of docs/view.md, from two runs: two minutes
	rm -rf build/screenshots
	$(OFFLINE) $(BIN)/atropos run --env gsm8k --model tiny --steps 30 --dir build/screenshots/gsm8k-default
	$(OFFLINE) $(BIN)/atropos run --env gsm8k --model tiny --steps 30 --set trainer.learning_rate=2e-3 --dir build/screenshots/gsm8k-fast
	.venv-view/bin/python -m tools.make_screenshots build/screenshots/gsm8k-default build/screenshots/gsm8k-fast
changes: .venv/test.stamp ## move the files of changes/ into CHANGELOG.md: make changes VERSION=0.2.0
	$(BIN)/python -m towncrier build --yes --version $(or $(VERSION),$(error give the version: make changes VERSION=0.2.0))

# --- measurements ---

each = $(foreach one,$(2),$(1) benchmarks.$(one)$(newline))

soak: .venv/test.stamp $(patsubst %,.venv-%/stamp,vllm skyrl roll ray) $(SWEEP) ## long fault and statistics runs; writes benchmarks/results/soak*.json: hours
	$(INSTALL) .venv -c environments/constraints.txt --no-build-isolation -e '.[soak]'
	$(call in) pytest -m long -n 2 --dist loadfile
	$(OFFLINE) $(BIN)/python -m benchmarks.soak_mutants
	$(BIN)/python -m benchmarks.planted_bugs
	$(OFFLINE) $(BIN)/python -m benchmarks.soak
	$(call each,$(in),soak_normalization soak_agents soak_api)
	$(BIN)/python -m benchmarks.hub_limit --draws 1000000
	$(call each,$(in),simulation soak_curriculum soak_ensemble soak_health reward_hacking observing recording rescoring)
	$(call in,roll) benchmarks.soak_roll
	$(call in,ray) benchmarks.soak_ray
	$(call each,$(call in,skyrl),soak_skyrl skyrl_throughput)
	$(call in,vllm) benchmarks.soak_vllm
	$(call in) benchmarks.soak_api_hostile
	+$(MAKE) soak-worlds
	$(if $(SWEEP),.venv-environments/bin/python -m benchmarks.atroposlib_environments --train)
soak-worlds: .venv/test.stamp $(patsubst %,.venv-%/stamp,worlds verifiers-v0 verifiers-v1) ## what is learned in other people's environments: an hour and a half
	$(call in) benchmarks.soak_worlds atroposlib
	$(call in,worlds) benchmarks.soak_worlds reasoning-gym gem textarena openenv
	$(call in,verifiers-v0) benchmarks.soak_worlds verifiers
	$(call in,verifiers-v1) benchmarks.soak_worlds verifiers
bench: .venv/run.stamp .venv-trl/stamp ## start-up, a whole run, losses and the update next to TRL's, overlap, the memory plan
	$(BIN)/python -m benchmarks.startup
	$(call each,$(OFFLINE) $(BIN)/python -m,quickstart losses trainer overlap plan)
bench-real: .venv/test.stamp .venv-real/stamp .venv-trl/stamp ## the pretrained model SmolLM2-135M next to TRL's trainer, and what it learns under three seeds: half an hour
	$(call each,$(OFFLINE) $(BIN)/python -m,real_model real_learning)
ON_GPU := $(or $(GPU_PYTHON),$(PYTHON)) -m benchmarks.gpu
gpu: ## on an idle CUDA device: vLLM with each bridge if it is installed, and engine hf with ipc; GPU_PYTHON=PYTHON has torch, and nothing is installed
	$(ON_GPU) --only vllm ipc
bench-gpu: ## on an idle CUDA device: speed, memory and gradients of updates; a real model that learns; the loop next to TRL's; GPU_PYTHON as for `make gpu`
	$(ON_GPU) --only training runs
bench-models: .venv/test.stamp ## every family of models: exact ways, bridges, LoRA, resume; and what the slower ways cost: half an hour
	$(call each,$(OFFLINE) $(BIN)/python -m,models models_bridges layouts)
bench-models-vllm: .venv-vllm/stamp ## which families of models vLLM samples exactly on a CPU; writes benchmarks/results/models.json
	$(call in,vllm) benchmarks.models_vllm
bench-bridges: .venv-vllm/stamp ## three bridges on the same work, with vLLM
	$(call in,vllm) benchmarks.bridges
bench-tinker: .venv/test.stamp .venv-tinker/stamp ## a training step over the Tinker protocol next to the same of `atropos run`: seven minutes
	$(OFFLINE) TINKER_PYTHON=.venv-tinker/bin/python $(BIN)/python -m benchmarks.tinker
bench-api: .venv/test.stamp .venv-atroposlib/stamp ## the trajectory API and atroposlib's server on the same bytes, with and without journal
	$(BIN)/python -m benchmarks.api
clean: ## remove the environments, build/ and dist/
	rm -rf .venv .venv-* build dist

# --- environments ---

# tools/install.py uses uv, which links what it has unpacked once into each environment.
.venv/run.stamp: environments/constraints.txt $(PROJECTS)
	@echo "installing into .venv (1 GB, of which torch is the most; downloaded once)"
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Atropos needs Python 3.11 or later; this is " + sys.version)'
	$(INSTALL) .venv -c environments/constraints.txt hatchling editables
	$(INSTALL) .venv -c environments/constraints.txt --no-build-isolation @all
	$(INSTALL) .venv --no-build-isolation --no-deps @worlds @launcher_ray
	touch $@

.venv/test.stamp: .venv/run.stamp
	$(INSTALL) .venv -c environments/constraints.txt --no-build-isolation -e '.[test]'
	touch $@

# environments/packages.toml says what each holds next to the pins of environments/NAME.txt.
NAMES := agents agents-pinned atroposlib docs environments mlflow ray real roll roll-source skyrl tinker tinker-newest triton trl verifiers-v0 verifiers-v1 view vllm worlds
$(patsubst %,.venv-%/stamp,$(NAMES)): .venv-%/stamp: environments/%.txt environments/packages.toml environments/constraints.txt
	$(INSTALL) $*
$(patsubst %,.venv-%/stamp,ray roll roll-source skyrl verifiers-v0 verifiers-v1 view vllm worlds): $(PROJECTS)
.venv-environments/stamp: .venv/test.stamp
.venv-view/stamp: | chromium
chromium:
	@[ -x /usr/bin/chromium ] || { [ "$$(id -u)" = 0 ] && apt-get install -y -q chromium; } || \
	  (echo "the viewer's tests need /usr/bin/chromium: install your system's package chromium"; false)

# The lock file names no registry: npm takes the configured one, and checks each package against its hash.
.venv-agents-node/stamp: tests/agents/node/package.json tests/agents/node/package-lock.json
	@echo "installing codex and opencode into $(@D) (half a minute, 0.8 GB)"
	command -v npm || (echo "codex and opencode need Node 20 or later with npm, and there is none in PATH"; false)
	mkdir -p $(@D)
	cp tests/agents/node/package.json tests/agents/node/package-lock.json $(@D)
	npm ci --prefix $(@D) --no-audit --no-fund
	touch $@
