//! A minimal WASI 0.2 for stock toolchains. It has no network, no files, no arguments and no
//! environment. Clocks and randomness are deterministic, and output goes to the log.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use tokio::io::AsyncWrite;
use wasmtime::component::{HasData, Linker};
use wasmtime_wasi::{
    WasiCtx, async_trait,
    cli::{IsTerminal, StdoutStream},
    p2::{
        self, OutputStream, Pollable, StreamResult,
        bindings::{
            clocks::{monotonic_clock, wall_clock},
            random::{insecure, insecure_seed, random},
        },
    },
};

use super::{
    clock::ClockView,
    log::{Log, StdStream},
    random::Random,
};
use crate::state::State;

/// Bytes that a guest may write between two calls of `check-write`.
const WRITE_BYTES_MAX: usize = 64 << 10;

/// Links WASI, with the host's own clocks and randomness in place of the library's, whose timers
/// would sleep.
pub(crate) fn link(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    p2::add_to_linker_async(linker)?;
    linker.allow_shadowing(true);
    wall_clock::add_to_linker::<_, Clocks>(linker, State::clocks)?;
    monotonic_clock::add_to_linker::<_, Clocks>(linker, State::clocks)?;
    random::add_to_linker::<_, Randomness>(linker, |state| &mut state.random)?;
    insecure::add_to_linker::<_, Randomness>(linker, |state| &mut state.random)?;
    insecure_seed::add_to_linker::<_, Randomness>(linker, |state| &mut state.random)?;
    linker.allow_shadowing(false);
    Ok(())
}

/// Makes a context that inherits nothing. Guests cannot even create sockets, each of which would
/// cost the host a file descriptor.
pub(crate) fn context(log: &Log) -> WasiCtx {
    WasiCtx::builder()
        .allow_tcp(false)
        .allow_udp(false)
        .allow_ip_name_lookup(false)
        .stdout(LogStream { log: log.clone(), output: StdStream::Stdout })
        .stderr(LogStream { log: log.clone(), output: StdStream::Stderr })
        .build()
}

struct Clocks;

impl HasData for Clocks {
    type Data<'a> = ClockView<'a>;
}

struct Randomness;

impl HasData for Randomness {
    type Data<'a> = &'a mut Random;
}

impl State {
    fn clocks(&mut self) -> ClockView<'_> {
        ClockView { clock: &self.clock, table: &mut self.table }
    }
}

/// Standard output or error, written to the handler's log.
#[derive(Clone)]
struct LogStream {
    log: Log,
    output: StdStream,
}

impl IsTerminal for LogStream {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for LogStream {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(self.clone())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

#[async_trait]
impl OutputStream for LogStream {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.log.write(self.output, &bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(WRITE_BYTES_MAX)
    }
}

#[async_trait]
impl Pollable for LogStream {
    async fn ready(&mut self) {}
}

impl AsyncWrite for LogStream {
    fn poll_write(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.log.write(self.output, bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
