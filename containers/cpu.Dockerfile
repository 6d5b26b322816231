# Atropos for a CPU, from a checkout: docker build -f containers/cpu.Dockerfile -t atropos:cpu .
# docs/install.md says how it is started, and what of it was not tried.
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN python -m venv /build \
 && /build/bin/pip install --no-cache-dir -c environments/constraints.txt build hatchling \
 && /build/bin/python -m tools.dist /wheels

FROM python:3.11-slim-bookworm
# torch's own index has a build without CUDA's libraries, which are most of the gigabytes of the other; empty: pip's own index
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=all
COPY environments/constraints.txt /opt/constraints.txt
RUN python -m venv /opt/atropos \
 && /opt/atropos/bin/pip install --no-cache-dir -c /opt/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    /opt/atropos/bin/pip install --no-cache-dir -c /opt/constraints.txt --find-links /wheels "atropos-rl[$EXTRAS]"
RUN useradd --create-home --uid 1000 atropos
USER 1000
WORKDIR /home/atropos
ENV PATH=/opt/atropos/bin:$PATH
ENTRYPOINT ["atropos"]
CMD ["--help"]
