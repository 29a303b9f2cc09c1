# syntax=docker/dockerfile:1
# An engine: vLLM's own image plus the connector, and nothing else changed.
# make images-pin images. Both bases are ones with a digest (bases.lock), or the build ends.
ARG PYTHON_IMAGE=python:3.12-slim
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS build
ARG PYTHON_IMAGE
ARG VLLM_IMAGE
ARG ALLOW_BASE_BY_TAG=false
COPY helm/images/check-base.sh /
RUN /check-base.sh "${ALLOW_BASE_BY_TAG}" "${PYTHON_IMAGE}" "${VLLM_IMAGE}"
WORKDIR /src
COPY helm/images/requirements-build.txt helm/images/build-wheel.sh helm/images/
RUN python -m pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r helm/images/requirements-build.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY proxy proxy
COPY connector connector
# The commit: there is no git here.
ARG REVISION=unknown
RUN PYTHON=python REVISION="${REVISION}" helm/images/build-wheel.sh . /wheels

FROM ${VLLM_IMAGE}
LABEL org.opencontainers.image.title="vLLM with the pdrelay connector" \
      org.opencontainers.image.licenses="Apache-2.0"
# vLLM's entrypoint stays; its user, root, is there only to install.
USER 0:0
COPY helm/images/install-engine.sh helm/images/requirements-nixl.txt /opt/pdrelay-install/
COPY --from=build /wheels /opt/pdrelay-install/wheels
RUN /opt/pdrelay-install/install-engine.sh /opt/pdrelay-install/wheels/pdrelay-*.whl
# A number: Kubernetes cannot tell from a name whether it is root (runAsNonRoot). RDMA wants root where memory is pinned by
# the capability IPC_LOCK, which reaches no other user's processes: the pod says so then (runAsUser: 0, or --user 0).
# The user has no entry in /etc/passwd, and Python asks for its name and its home.
ENV HOME=/tmp USER=pdrelay
USER 65532:65532
# An engine says that it is well at /health, and Kubernetes asks there.
HEALTHCHECK NONE
