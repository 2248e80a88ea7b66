# docker build -t aft_mm . && docker run --rm -v "$PWD":/work aft_mm sample mnist --out digits.png
FROM python:3.13-slim
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The compiler is for the C++ loops and torch.compile, the libraries for OpenCV.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgl1 libglib2.0-0 && \
    rm -rf /var/lib/apt/lists/*
COPY requirements/lock.txt /tmp/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/lock.txt
COPY . /src
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src /src/minis && rm -rf /src && \
    useradd --create-home --uid 1000 user
USER 1000
WORKDIR /work
ENTRYPOINT ["aft_mm"]
