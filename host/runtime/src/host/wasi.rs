//! A minimal WASI 0.2 for stock toolchains. It has no network, no files, no arguments and no
//! environment. Clocks and randomness are deterministic, and output goes to the log.

pub(crate) mod sandbox;

use wasmtime::component::{HasData, Linker};
use wasmtime_wasi::p2::{
    self,
    bindings::{
        clocks::{monotonic_clock, wall_clock},
        random::{insecure, insecure_seed, random},
    },
};

use super::{clock::ClockView, random::Random};
use crate::state::StoreState;

/// Links WASI, with the host's own clocks and randomness in place of the library's, whose timers
/// would sleep.
pub(crate) fn link(linker: &mut Linker<StoreState>) -> wasmtime::Result<()> {
    p2::add_to_linker_async(linker)?;
    linker.allow_shadowing(true);
    wall_clock::add_to_linker::<_, Clocks>(linker, StoreState::clocks)?;
    monotonic_clock::add_to_linker::<_, Clocks>(linker, StoreState::clocks)?;
    random::add_to_linker::<_, Randomness>(linker, |state| &mut state.random)?;
    insecure::add_to_linker::<_, Randomness>(linker, |state| &mut state.random)?;
    insecure_seed::add_to_linker::<_, Randomness>(linker, |state| &mut state.random)?;
    linker.allow_shadowing(false);
    Ok(())
}

struct Clocks;

impl HasData for Clocks {
    type Data<'a> = ClockView<'a>;
}

struct Randomness;

impl HasData for Randomness {
    type Data<'a> = &'a mut Random;
}

impl StoreState {
    fn clocks(&mut self) -> ClockView<'_> {
        ClockView { clock: &self.clock, table: &mut self.table }
    }
}
