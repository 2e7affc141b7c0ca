# Images of kie: `docker build --target cpu .` and `docker build --target cuda .`; the last stage is
# the CPU's. The wheel is built from this tree; what runs has no toolchain in it. A server that
# other machines can reach wants a key: `docker run -e KIE_API_KEY=... -p 8000:8000 IMAGE`.

FROM debian:trixie-slim AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential ca-certificates git python3-venv rustup \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /kie
COPY rust-toolchain.toml Cargo.toml Cargo.lock pyproject.toml README.md LICENSE NOTICE ./
COPY tools/wheel-requirements.txt tools/wheel-requirements.txt
RUN rustup toolchain install --profile minimal "$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)" \
    && python3 -m venv /tools \
    && /tools/bin/pip install --no-cache-dir --requirement tools/wheel-requirements.txt
COPY crates crates
COPY kernels kernels
COPY python python
COPY tests tests
COPY examples examples
COPY benches benches
RUN /tools/bin/maturin build --profile dist --locked --compatibility off --out /wheels

FROM debian:trixie-slim AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/kie \
    && useradd --create-home --uid 1000 kie
ENV PATH=/opt/kie/bin:$PATH HF_HOME=/models
VOLUME /models
EXPOSE 8000

# The driver comes from the host (`docker run --gpus all`); the run-time compiler is a Python package.
FROM base AS cuda
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    wheel=$(echo /wheels/kie-*.whl) \
    && pip install --no-cache-dir "kie[cuda,hub] @ file://$wheel"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
ENTRYPOINT ["kie"]
CMD ["serve", "--host", "0.0.0.0"]

FROM base AS cpu
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    wheel=$(echo /wheels/kie-*.whl) \
    && pip install --no-cache-dir "kie[hub] @ file://$wheel"
USER 1000
ENTRYPOINT ["kie"]
CMD ["serve", "--host", "0.0.0.0"]
