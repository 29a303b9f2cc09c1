# syntax=docker/dockerfile:1
# The router: make images-pin images. With spans (--otlp-endpoint): --build-arg REQUIREMENTS=requirements-router-tracing.txt
# PYTHON_IMAGE is one with a digest (bases.lock), or the build ends.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ARG PYTHON_IMAGE
ARG ALLOW_BASE_BY_TAG=false
COPY helm/images/check-base.sh /
RUN /check-base.sh "${ALLOW_BASE_BY_TAG}" "${PYTHON_IMAGE}"
ARG REQUIREMENTS=requirements-router.txt
# The router is compiled (hatch_build.py), here and nowhere else: the image has no compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY helm/images/requirements-*.txt helm/images/*.sh helm/images/
RUN python -m pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes \
    -r helm/images/requirements-build.txt -r helm/images/requirements-compile.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY proxy proxy
COPY connector connector
# The commit: there is no git here.
ARG REVISION=unknown
RUN PYTHON=python REVISION="${REVISION}" HATCH_BUILD_HOOK_ENABLE_CUSTOM=true helm/images/build-wheel.sh . /wheels \
    && PYTHON=python helm/images/install-router.sh /opt/pdrelay /wheels/pdrelay-*.whl "helm/images/${REQUIREMENTS}"

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="pdrelay router" \
      org.opencontainers.image.licenses="Apache-2.0"
# Everything is installed: whoever gets in shall not install more.
RUN python -m pip uninstall --yes --quiet pip
COPY --from=build /opt/pdrelay /opt/pdrelay
# No .pyc files: the root may be read-only. Python's output goes to the log at once.
ENV PATH=/opt/pdrelay/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# A number: Kubernetes cannot tell from a name whether it is root (runAsNonRoot).
USER 65532:65532
WORKDIR /
EXPOSE 8000
# Kubernetes probes /health and /ready; a check of the container's own would ask twice.
HEALTHCHECK NONE
# SIGTERM drains: docs/router.md, "Ending".
STOPSIGNAL SIGTERM
ENTRYPOINT ["pdrelay", "serve"]
CMD ["--host", "0.0.0.0"]
