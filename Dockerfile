# JupyterLab with the notebooks, on the CPU: docker build -t kvrepro . && docker run -p 8888:8888 kvrepro
# Binder builds its servers from this file, too, and names the user; `make` in it works as in any clone.
FROM python:3.11-slim-bookworm
ARG NB_USER=reader
ARG NB_UID=1000
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends chromium git make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid "$NB_UID" "$NB_USER" \
 && install --directory --owner="$NB_UID" "/home/$NB_USER/kvrepro"
USER $NB_UID
ENV HOME=/home/$NB_USER PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
WORKDIR $HOME/kvrepro
ENV PATH=$HOME/kvrepro/.venv/bin:$PATH
COPY --chown=$NB_UID . .
RUN make .venv/.ready
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "--LabApp.default_url=/lab/tree/notebooks"]
