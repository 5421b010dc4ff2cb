# syntax=docker/dockerfile:1

FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
# The queries were checked against a database before they were committed; the build needs none.
ENV SQLX_OFFLINE=true
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin opledger \
    && install -D target/release/opledger /out/opledger

FROM debian:bookworm-slim
# TLS trusts the system's roots.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin opledger
COPY --from=build /out/opledger /usr/local/bin/opledger
COPY LICENSE /usr/share/doc/opledger/LICENSE
USER 10001:10001
WORKDIR /etc/opledger
ENV OPLEDGER_LISTEN=0.0.0.0:8080
EXPOSE 8080
STOPSIGNAL SIGTERM
# The binary asks its own /healthz, so the image needs no curl.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 CMD ["opledger", "healthcheck"]
ENTRYPOINT ["opledger"]
CMD ["serve"]
