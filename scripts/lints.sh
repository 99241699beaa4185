# Sourced by check.sh and .ci/run: from here on cargo lints the workspace as it builds it. `cargo clippy` only checks,
# which shares nothing with a build and takes all dependencies once more.
export RUSTC_WORKSPACE_WRAPPER=clippy-driver
# As `cargo clippy -- -D warnings` hands it over.
export CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
