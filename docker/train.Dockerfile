# An example for the training side: torch, the hook and the pusher, started by torchrun.
#
#   docker build -f docker/train.Dockerfile -t noisescale-train .
#   docker run --network host noisescale-train --nproc-per-node=2 train.py
#
# Take the pip line into the image you train with; everything else here is to have something that runs.
FROM python:3.13.9-slim-trixie
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY noisescale noisescale
COPY client client
COPY server server
# torch's wheel on PyPI is the CUDA one; name another index with --build-arg PIP_EXTRA_INDEX_URL=... for another.
RUN python3 -m pip install -c constraints.txt '.[torch,client]'
COPY docker/examples/train.py /work/
WORKDIR /work
USER 10001:10001
# Where to report to, and what the run is called; the token comes from a secret, never from here.
ENV NOISESCALE_REPORT_TO=http://127.0.0.1:8000 NOISESCALE_RUN=example
ENTRYPOINT ["torchrun"]
CMD ["--standalone", "--nproc-per-node=2", "train.py"]
