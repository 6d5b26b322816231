# Atropos for NVIDIA GPUs, from a checkout: docker build -f containers/cuda.Dockerfile -t atropos:cuda .
# docs/install.md says how it is started, and what of it was not tried.
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN python -m venv /build \
 && /build/bin/pip install --no-cache-dir -c environments/constraints.txt build hatchling \
 && /build/bin/python -m tools.dist /wheels

# CUDA's libraries come with torch's wheels, and the driver from the machine (NVIDIA Container Toolkit): no CUDA image is needed
FROM python:3.11-slim-bookworm
ARG EXTRAS=all,vllm
# Triton compiles its launchers when they are first used
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY environments/constraints.txt /opt/constraints.txt
RUN python -m venv /opt/atropos \
 && /opt/atropos/bin/pip install --no-cache-dir -c /opt/constraints.txt torch
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    /opt/atropos/bin/pip install --no-cache-dir --find-links /wheels "atropos-rl[$EXTRAS]"
RUN useradd --create-home --uid 1000 atropos
USER 1000
WORKDIR /home/atropos
ENV PATH=/opt/atropos/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["atropos"]
CMD ["--help"]
