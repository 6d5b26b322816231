# Two commands: `make run` trains the tiny policy, `make test` runs the tests of core and most plugins.
# With vLLM, in an environment of its own: `make vllm`, `make test-vllm`; the same with atroposlib, SkyRL, and gem for ROLL:
# `make test-atroposlib`, `make test-skyrl`, `make test-roll`, `make test-verifiers`; and with the programs that agents are made of: `make test-agents`;
# with a browser: `make test-view`.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(PYTHON) tools/install.py
ROLL_VENV := $(if $(ROLL_SOURCE),.venv-roll-source,.venv-roll)
LIBS := $(sort $(wildcard libs/*/pyproject.toml))
PLUGINS := $(LIBS) $(sort $(wildcard plugins/*/pyproject.toml))
CORE := -e . $(patsubst %/pyproject.toml,-e ./%,$(LIBS))
PYTEST := HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
WORLDS := $(patsubst %,plugins/%/pyproject.toml,env_gem env_reasoning_gym env_textarena env_verifiers)
RAY := plugins/launcher_ray/pyproject.toml
ROLE_TESTS := $(wildcard tests/e2e/test_roles*.py)
API_TESTS := plugins/trajectory_api/tests $(wildcard tests/e2e/test_api_*.py)
AGENT_TESTS := plugins/agent_api/tests $(wildcard tests/e2e/test_agent_*.py) tests/e2e/test_serve_agent.py
FEW_BITS_TESTS := tests/e2e/test_quantize.py $(wildcard plugins/*/tests/test_quantization.py) plugins/trainer_grpo/tests/test_torchao.py
EDITABLE := -e . $(patsubst %/pyproject.toml,-e ./%,$(filter-out $(WORLDS) $(RAY),$(PLUGINS)))
WORLDS_EDITABLE := $(patsubst %/pyproject.toml,-e ./%,$(WORLDS))

# Where a machine sets it, each of the thousand processes that the tests start would compile all of our modules anew (a quarter of a
# second of CPU for `atropos run --dry-run`); what pip installs is compiled as it is installed.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run environments test tests test-roles test-trajectory-api test-agent-api quick quick-tests lint vllm test-vllm test-vllm-short test-atroposlib test-environments test-skyrl test-roll test-worlds test-worlds-short test-ray test-ray-short test-slurm test-slurm-short test-machines test-gpu test-pages test-verifiers test-verifiers-short test-agents test-agents-short test-export test-view test-mlflow test-pythons test-pythons-short dist test-dist site test-site slurm screenshots changes soak soak-worlds bench gpu bench-bridges bench-api clean

run: .venv/run.stamp
	$(BIN)/atropos run --bridge ipc --env gsm8k

# Lint and the tests at the same time: mypy without its cache takes half a minute of one core. Eight files at a time, on two cores as
# well: more than half of the tests' time is waiting (a kill that is noticed, a deadline, a server that starts).
test: .venv/test.stamp
	+$(MAKE) -j 2 lint tests

# For whoever edits a file: lint, and every test file but those that took longer than conftest.py says when they were last
# recorded (`PYTEST_ADDOPTS=--record-seconds make test` records them). A new file is in it by itself.
quick: .venv/test.stamp
	+$(MAKE) -j 2 lint quick-tests

# Without what has a target of its own.
tests: .venv/test.stamp
	$(PYTEST) $(if $(COLD),,--warm) -n 8 $(addprefix --ignore ,$(addprefix tests/,slurm machines kubernetes gpu pages) plugins/simulation/tests/test_pages.py \
	  $(ROLE_TESTS) $(API_TESTS) $(AGENT_TESTS) $(FEW_BITS_TESTS))

quick-tests: .venv/test.stamp
	$(PYTEST) $(if $(COLD),,--warm) -n 2 --quick

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# What .ci/run needs beside .venv.
environments: .venv-view/stamp .venv-atroposlib/stamp .venv-roll/stamp .venv-worlds/stamp .venv-ray/stamp .venv-skyrl/stamp .venv-agents/stamp \
  .venv-agents-node/stamp .venv-trl/stamp .venv-docs/stamp .venv-verifiers-v0/stamp .venv-verifiers-v1/stamp .venv-vllm/stamp
	$(BIN)/python -m tools.other_pythons --install 3.12 3.13

vllm: .venv-vllm/stamp

# With a real vLLM; about ten minutes. Most of it is the start of servers, of which two at a time fit on two cores. A file's
# tests share a server, and follow each other.
test-vllm: .venv-vllm/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-vllm/bin/python -m pytest tests/vllm -n 2 --dist loadfile --no-loadscope-reorder

# Each bridge with one family of models, everything of the engine and of bridge_ipc, a kill and a planted fault: four minutes.
test-vllm-short: .venv-vllm/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-vllm/bin/python -m pytest tests/vllm/test_engine.py tests/vllm/test_engine_role.py tests/vllm/test_sleep_mode.py \
	  tests/vllm/test_bridge_ipc.py tests/vllm/test_bridge_lora.py tests/vllm/test_bridge_checkpoint.py tests/vllm/test_kills.py \
	  -n 2 --dist loadfile --no-loadscope-reorder -k "not qwen and not server and not core and not trainer] and not adapters_that"

# The server of ours against the clients of atroposlib 0.4.0, and beside its own server; about three minutes.
test-atroposlib: .venv/test.stamp .venv-atroposlib/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE ATROPOSLIB_PYTHON=.venv-atroposlib/bin/python $(BIN)/python -m pytest tests/atroposlib tests/pages/test_their_names.py

# Environment files of atroposlib's shapes; of a checkout of it as well, unmodified, where ATROPOSLIB_SOURCE names one. `make soak` also trains.
test-environments: .venv/test.stamp $(if $(ATROPOSLIB_SOURCE),.venv-environments/stamp)
	$(PYTEST) $(if $(COLD),,--warm) -n 2 plugins/env_atroposlib/tests
	$(if $(ATROPOSLIB_SOURCE),.venv-environments/bin/python -m benchmarks.atroposlib_environments,@echo "ATROPOSLIB_SOURCE names no checkout: the 119 files of atroposlib were not tried")

# Our environments in gem and in a Ray actor, with the real packages. `ROLL_SOURCE=path/of/a/checkout make test-roll` runs the same and
# more with ROLL's own classes, in an environment of its own, and says what differs from the ROLL that is known.
test-roll: $(ROLL_VENV)/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(ROLL_VENV)/bin/python -m pytest tests/roll plugins/adapter_roll/tests

# Our environments inside SkyRL's own trainer, on a CPU; two to three minutes. Against a checkout where SKYRL_SOURCE names one.
test-skyrl: .venv-skyrl/stamp
	$(if $(SKYRL_SOURCE),PYTHONPATH=$(SKYRL_SOURCE):$(SKYRL_SOURCE)/skyrl-gym) HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE \
	  .venv-skyrl/bin/python -m pytest tests/skyrl plugins/adapter_skyrl tests/pages/test_their_names.py

# Environments of other worlds, each trained for five steps with the real packages; three minutes.
test-worlds: .venv-worlds/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-worlds/bin/python -m pytest tests/worlds $(wildcard $(patsubst %/pyproject.toml,%/tests,$(WORLDS))) -n 2

# The training alone.
test-worlds-short: .venv-worlds/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-worlds/bin/python -m pytest tests/worlds -n 2 -k trains

# Environments of verifiers' two contracts, each with the version that has it; some five minutes.
test-verifiers: .venv-verifiers-v0/stamp .venv-verifiers-v1/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-verifiers-v0/bin/python -m pytest tests/verifiers plugins/env_verifiers/tests -n 2
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-verifiers-v1/bin/python -m pytest tests/verifiers plugins/env_verifiers/tests -n 2

# The training.
test-verifiers-short: .venv-verifiers-v0/stamp .venv-verifiers-v1/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-verifiers-v0/bin/python -m pytest tests/verifiers -n 2 -k trains
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-verifiers-v1/bin/python -m pytest tests/verifiers -n 2 -k trains

# Runs on a Ray cluster of simulated machines, with kills of each, and workers that become more and fewer; eleven minutes.
test-ray: .venv-ray/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-ray/bin/python -m pytest tests/ray plugins/launcher_ray/tests

# The same weights as without, a trainer, a worker and a server killed, and what is refused.
test-ray-short: .venv-ray/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-ray/bin/python -m pytest tests/ray plugins/launcher_ray/tests -k "not lost and not stays and not engine] and not become and not random and not as_soon and not machine_of and not over_two"

# Runs as jobs of a real Slurm, whose nodes are namespaces of this machine, with kills of each; ten minutes.
test-slurm: .venv/test.stamp slurm
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests/slurm

# The contract in a job, a role killed, and what is refused.
test-slurm-short: .venv/test.stamp slurm
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest tests/slurm -k "contract or trainer] or refuse or submit_submits"

# Every example of the README and of docs, as it stands there.
test-pages: .venv/test.stamp
	$(PYTEST) $(if $(COLD),,--warm) -n 4 tests/pages plugins/simulation/tests/test_pages.py

# Server, engines, workers and trainer of one run, each started by itself; most of the time is waiting for what was killed.
test-roles: .venv/test.stamp
	$(PYTEST) $(if $(COLD),,--warm) -n 2 $(ROLE_TESTS)

# The trajectory API: its server, journal and clients, hostile input, kills and load.
test-trajectory-api: .venv/test.stamp
	$(PYTEST) $(if $(COLD),,--warm) -n 4 $(API_TESTS)

# The agents' API and its sandboxes, and runs whose rollouts are programs, with kills of each.
test-agent-api: .venv/test.stamp
	$(PYTEST) $(if $(COLD),,--warm) -n 4 $(AGENT_TESTS)

# Trainers and engines over several machines, and a Kubernetes of which pods are lost: each machine is a network namespace of this one.
test-machines: .venv/test.stamp
	$(PYTEST) $(if $(COLD),,--warm) -n 2 tests/machines tests/kubernetes

# What one GPU's memory is for: what `make gpu` checks, in a small form on a CPU, with nothing installed but torch and transformers (on a
# GPU the whole), and the Triton kernels, interpreted; and bases and moments in fewer bits, of which torchao's are compiled: that needs a
# C++ compiler.
test-gpu: .venv/test.stamp .venv-triton/stamp
	TRITON_PYTHON=.venv-triton/bin/python $(PYTEST) $(if $(COLD),,--warm) -n 4 tests/gpu $(FEW_BITS_TESTS)

slurm:
	@command -v slurmctld || [ -x /usr/sbin/slurmctld ] || { [ "$$(id -u)" = 0 ] && apt-get update -q && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends slurmctld slurmd slurm-client munge; } || \
	  (echo "these tests need Slurm's daemons: install your system's packages slurmctld, slurmd, slurm-client and munge"; false)

# The files of changes/ become an entry of CHANGELOG.md: make changes VERSION=0.2.0
changes: .venv/test.stamp
	$(BIN)/python -m towncrier build --yes --version $(or $(VERSION),$(error give the version: make changes VERSION=0.2.0))

# A wheel and a source distribution of each package, in dist/.
dist: .venv/test.stamp
	rm -rf dist
	$(BIN)/python -m tools.dist dist

# The wheels as a stranger meets them: pip alone installs them into a clean environment, a policy trains there, its page opens, and pip takes
# all of it away again. Three minutes, most of it torch.
test-dist: dist
	DIST=dist $(BIN)/python -m pytest tests/dist

# The quick tests of core, and of every plugin that needs no torch, on the other Pythons that wheels are for. On a machine without one of them it says
# so.
test-pythons: .venv/test.stamp
	$(BIN)/python -m tools.other_pythons 3.12 3.13

# What differs between Pythons: servers, processes, what is sent between them, files, packages. Two to three minutes for the two, and one or two to install.
test-pythons-short: .venv/test.stamp
	$(BIN)/python -m tools.other_pythons --short 3.12 3.13

# docs/, the READMEs and a reference made from the code, as a site in build/site/site; a broken link ends it.
site: .venv/test.stamp .venv-docs/stamp
	rm -rf build/site
	$(BIN)/python -m tools.make_site build/site
	cd build/site && NO_MKDOCS_2_WARNING=1 ../../.venv-docs/bin/mkdocs build --quiet --strict
	@echo "the site is in build/site/site: open index.html"

# That site opened from its folder in a real Chromium: nothing comes from elsewhere, and its search finds a word.
test-site: site .venv-view/stamp
	SITE=build/site/site .venv-view/bin/python -m pytest tests/site

# Real clients of the agents' API, each of which completes a task with a tool and is trained. Their environments hold nothing of
# ours: the clients are processes, and only speak HTTP.
test-agents: .venv/test.stamp
	+$(MAKE) -j 3 .venv-agents/stamp .venv-agents-pinned/stamp .venv-agents-node/stamp
	HF_HUB_OFFLINE=1 AGENT_CLIENTS=.venv-agents:.venv-agents-pinned:.venv-agents-node $(BIN)/python -m pytest tests/agents -n 2

# Those of one environment of Python, and codex and opencode.
test-agents-short: .venv/test.stamp
	+$(MAKE) -j 2 .venv-agents/stamp .venv-agents-node/stamp
	HF_HUB_OFFLINE=1 AGENT_CLIENTS=.venv-agents:.venv-agents-node $(BIN)/python -m pytest tests/agents -n 2

# What `atropos export` writes, in TRL's own trainers, on the tiny policy; two minutes.
test-export: .venv/test.stamp .venv-trl/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE TRL_PYTHON=.venv-trl/bin/python $(BIN)/python -m pytest tests/trl

# The sink `mlflow` and a server of MLflow's own, killed while a run goes on.
test-mlflow: .venv/test.stamp .venv-mlflow/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE MLFLOW_PYTHON=.venv-mlflow/bin/python $(BIN)/python -m pytest tests/mlflow

# The viewer's page in a real Chromium, driven by playwright: keys, widths, colours, hostile texts; two to three minutes.
test-view: .venv-view/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-view/bin/python -m pytest tests/view

# The pictures of docs/view.md, from two runs that it makes; two minutes.
screenshots: .venv/run.stamp .venv-view/stamp
	rm -rf build/screenshots
	HF_HUB_OFFLINE=1 $(BIN)/atropos run --env gsm8k --model tiny --steps 30 --dir build/screenshots/gsm8k-default
	HF_HUB_OFFLINE=1 $(BIN)/atropos run --env gsm8k --model tiny --steps 30 --set trainer.learning_rate=2e-3 --dir build/screenshots/gsm8k-fast
	.venv-view/bin/python -m tools.make_screenshots build/screenshots/gsm8k-default build/screenshots/gsm8k-fast

# Long fault and statistics runs. Writes benchmarks/results/soak*.json with the commit that it ran on.
soak: .venv/test.stamp .venv-vllm/stamp .venv-skyrl/stamp .venv-roll/stamp .venv-ray/stamp $(if $(ATROPOSLIB_SOURCE),.venv-environments/stamp)
	$(INSTALL) .venv -c environments/constraints.txt --no-build-isolation -e '.[soak]'
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m long -n 2 --dist loadfile
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.soak_mutants
	$(BIN)/python -m benchmarks.planted_bugs
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.soak
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_normalization
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_agents
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_api
	$(BIN)/python -m benchmarks.hub_limit --draws 1000000
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.simulation
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_curriculum
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_ensemble
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_health
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.observing
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.recording
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-roll/bin/python -m benchmarks.soak_roll
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-ray/bin/python -m benchmarks.soak_ray
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-skyrl/bin/python -m benchmarks.soak_skyrl
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-skyrl/bin/python -m benchmarks.skyrl_throughput
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-vllm/bin/python -m benchmarks.soak_vllm
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_api_hostile
	+$(MAKE) soak-worlds
	$(if $(ATROPOSLIB_SOURCE),.venv-environments/bin/python -m benchmarks.atroposlib_environments --train)

# What is learned in environments of others, one of each kind; benchmarks/results/soak_worlds.json. An hour and a half on two quiet cores.
soak-worlds: .venv/test.stamp .venv-worlds/stamp .venv-verifiers-v0/stamp .venv-verifiers-v1/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_worlds atroposlib
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-worlds/bin/python -m benchmarks.soak_worlds reasoning-gym gem textarena openenv
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-verifiers-v0/bin/python -m benchmarks.soak_worlds verifiers
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-verifiers-v1/bin/python -m benchmarks.soak_worlds verifiers

# Beside TRL, in an environment of its own.
bench: .venv/run.stamp .venv-trl/stamp
	$(BIN)/python -m benchmarks.startup
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.quickstart
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.losses
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.trainer
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.overlap
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.plan

# On a CUDA device that nothing else uses: what must hold there, and tokens per second and peak memory of updates, with TRL's beside them where it is
# installed. In whichever Python has torch for that device; nothing is installed or downloaded.
gpu:
	$(or $(GPU_PYTHON),$(PYTHON)) -m benchmarks.gpu

# The three bridges on the same work, with vLLM.
bench-bridges: .venv-vllm/stamp
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE .venv-vllm/bin/python -m benchmarks.bridges

# The trajectory API beside atroposlib's own server, in an environment of its own: the same bytes, journal off and on.
bench-api: .venv/test.stamp .venv-atroposlib/stamp
	$(BIN)/python -m benchmarks.api

# Of uv, which keeps what it unpacks and links it into each environment: nothing is downloaded or unpacked twice.
.venv/run.stamp: pyproject.toml environments/constraints.txt $(PLUGINS)
	@echo "installing into .venv (1 GB, of which torch is the most; downloaded once)"
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Atropos needs Python 3.11 or later; this is " + sys.version)'
	$(INSTALL) .venv -c environments/constraints.txt hatchling editables
	$(INSTALL) .venv -c environments/constraints.txt --no-build-isolation $(EDITABLE)
	$(INSTALL) .venv --no-build-isolation --no-deps $(WORLDS_EDITABLE) -e ./plugins/launcher_ray
	touch $@

.venv/test.stamp: .venv/run.stamp
	$(INSTALL) .venv -c environments/constraints.txt --no-build-isolation -e '.[test]'
	touch $@

# Of each further environment a few processes import a part: what they import is compiled then, and kept.

# torch is the one file without a hash: environments/vllm.txt says why.
.venv-vllm/stamp: pyproject.toml environments/constraints.txt environments/vllm.txt $(PLUGINS)
	@echo "installing vLLM into .venv-vllm (2 GB)"
	$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("environments/vllm.txt is for Python 3.11 to 3.13; this is " + sys.version)'
	$(INSTALL) $(@D) --no-deps --require-hashes -r environments/vllm.txt
	$(INSTALL) $(@D) --no-deps -c environments/constraints.txt torch
	$(INSTALL) $(@D) --no-deps --no-build-isolation $(EDITABLE)
	.venv-vllm/bin/python -c 'import torch, vllm' || (echo "torch in .venv-vllm is not the build that vLLM wants: see environments/vllm.txt"; false)
	touch $@

.venv-atroposlib/stamp: environments/atroposlib.txt environments/constraints.txt
	@echo "installing atroposlib into .venv-atroposlib (1 GB, of which torch is the most)"
	$(INSTALL) $(@D) --no-deps -r environments/atroposlib.txt
	$(INSTALL) $(@D) --no-deps -c environments/constraints.txt torch
	.venv-atroposlib/bin/python -c 'import atroposlib.envs.base, atroposlib.api, example_trainer.api'
	touch $@

# Beside what .venv has: the processes of the sweep are forked from one that has imported it.
.venv-environments/stamp: environments/environments.txt .venv/test.stamp
	@echo "installing what environment files of atroposlib import into .venv-environments"
	$(INSTALL) $(@D) --no-deps -r environments/environments.txt
	.venv-environments/bin/python -c 'import pathlib, sysconfig; own = sysconfig.get_path("purelib"); beside = own.replace("/.venv-environments/", "/.venv/"); pathlib.Path(own, "beside.pth").write_text(f"import site; site.addsitedir({beside!r})")'
	touch $@

.venv-roll/stamp .venv-roll-source/stamp: .venv-%/stamp: environments/%.txt pyproject.toml environments/constraints.txt plugins/adapter_roll/pyproject.toml plugins/env_gsm8k/pyproject.toml
	@echo "installing gem and Ray into $(@D) (1.6 GB, of which torch is the most)"
	$(PYTHON) -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit("gem-llm 0.1.0 is for Python 3.11; this is " + sys.version)'
	$(INSTALL) $(@D) --no-deps -r environments/$*.txt
	$(INSTALL) $(@D) --no-deps -c environments/constraints.txt torch
	$(INSTALL) $(@D) --no-deps --no-build-isolation $(CORE) -e ./plugins/adapter_roll -e ./plugins/env_gsm8k
	$(@D)/bin/python -c 'import gem, ray, atropos_adapter_roll.env'
	touch $@

# gem-llm wants another reasoning-gym than is tested here: hence no dependencies by themselves.
.venv-worlds/stamp: environments/worlds.txt pyproject.toml environments/constraints.txt $(WORLDS)
	@echo "installing other worlds' environments into $(@D) (1.6 GB, of which torch is the most)"
	$(INSTALL) $(@D) --no-deps -r environments/worlds.txt
	$(INSTALL) $(@D) --no-deps -c environments/constraints.txt torch
	$(INSTALL) $(@D) --no-deps --no-build-isolation $(EDITABLE) $(WORLDS_EDITABLE)
	touch $@

.venv-verifiers-v0/stamp .venv-verifiers-v1/stamp: .venv-verifiers-%/stamp: environments/verifiers-%.txt pyproject.toml environments/constraints.txt $(PLUGINS)
	@echo "installing verifiers, contract $*, into $(@D) (1.7 GB, of which torch is the most)"
	$(INSTALL) $(@D) --no-deps -r environments/verifiers-$*.txt
	$(INSTALL) $(@D) --no-deps -c environments/constraints.txt torch
	$(INSTALL) $(@D) --no-deps --no-build-isolation $(CORE) $(patsubst %,-e ./plugins/%,agent_api bridge_ipc engine_hf env_gsm8k env_verifiers normalization trainer_grpo)
	touch $@

.venv-ray/stamp: environments/ray.txt pyproject.toml environments/constraints.txt $(RAY)
	@echo "installing Ray into $(@D) (1.3 GB, of which torch is the most)"
	$(INSTALL) $(@D) --no-deps -r environments/ray.txt
	$(INSTALL) $(@D) --no-deps -c environments/constraints.txt torch
	$(INSTALL) $(@D) --no-deps --no-build-isolation $(CORE) $(patsubst %,-e ./plugins/%,launcher_ray bridge_checkpoint bridge_delta bridge_ipc bridge_lora distillation engine_hf env_gsm8k trainer_grpo trajectory_api)
	touch $@

# environments/skyrl.txt says what typed_dict.pth is for.
.venv-skyrl/stamp: environments/skyrl.txt environments/constraints.txt pyproject.toml $(PLUGINS)
	@echo "installing SkyRL into .venv-skyrl (2 GB, of which torch and ray are the most)"
	$(INSTALL) $(@D) --no-deps -r environments/skyrl.txt
	$(INSTALL) $(@D) --no-deps -c environments/constraints.txt torch
	.venv-skyrl/bin/python -c 'import sys, sysconfig, pathlib; sys.version_info >= (3, 12) or pathlib.Path(sysconfig.get_path("purelib"), "typed_dict.pth").write_text("import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict\n")'
	$(INSTALL) $(@D) --no-deps --no-build-isolation $(CORE) $(patsubst %,-e ./plugins/%,adapter_skyrl engine_hf env_gsm8k trajectory_api)
	.venv-skyrl/bin/python -c 'import skyrl.train.trainer'
	touch $@

.venv-agents/stamp .venv-agents-pinned/stamp: .venv-%/stamp: environments/%.txt
	@echo "installing clients of Python into $(@D) (0.5 GB)"
	$(INSTALL) $(@D) --no-deps -r environments/$*.txt
	.venv-uv/bin/uv pip check -q --python $(@D)/bin/python
	touch $@

# The lock file names no registry: npm takes the one that it is configured with, and checks each package against its hash.
.venv-agents-node/stamp: tests/agents/node/package.json tests/agents/node/package-lock.json
	@echo "installing codex and opencode into $(@D) (half a minute, 0.8 GB)"
	command -v npm || (echo "codex and opencode need Node 20 or later with npm, and there is none in PATH"; false)
	mkdir -p $(@D)
	cp tests/agents/node/package.json tests/agents/node/package-lock.json $(@D)
	npm ci --prefix $(@D) --no-audit --no-fund
	touch $@

.venv-view/stamp: environments/view.txt pyproject.toml environments/constraints.txt plugins/viewer/pyproject.toml
	@echo "installing playwright into $(@D), and Chromium where it is missing (half a minute)"
	test -x /usr/bin/chromium || { [ "$$(id -u)" = 0 ] && apt-get install -y -q chromium; } || \
	  (echo "the viewer's tests need /usr/bin/chromium: install your system's package chromium"; false)
	$(INSTALL) $(@D) -c environments/constraints.txt -r environments/view.txt
	$(INSTALL) $(@D) -c environments/constraints.txt --no-build-isolation -e '.[api]' -e ./libs/http_server -e ./plugins/viewer
	touch $@

.venv-mlflow/stamp: environments/mlflow.txt
	$(INSTALL) $(@D) -r environments/mlflow.txt
	touch $@

.venv-docs/stamp: environments/docs.txt
	$(INSTALL) $(@D) -r environments/docs.txt
	touch $@

.venv-trl/stamp: environments/trl.txt environments/constraints.txt
	$(INSTALL) $(@D) -r environments/trl.txt
	touch $@

.venv-triton/stamp: environments/triton.txt
	$(INSTALL) $(@D) -r environments/triton.txt
	touch $@

clean:
	rm -rf .venv .venv-uv .venv-triton .venv-python3.12 .venv-python3.13 .venv-docs .venv-agents .venv-agents-node .venv-agents-pinned .venv-atroposlib .venv-environments .venv-roll .venv-roll-source .venv-skyrl .venv-ray .venv-verifiers-v0 .venv-verifiers-v1 .venv-trl .venv-view .venv-vllm .venv-worlds build dist
