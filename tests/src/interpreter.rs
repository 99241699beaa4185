//! A component that does what each message says, statement by statement.
//!
//! The headers of a message are its steps, by their first letters: `e` executes the header's value,
//! `q` enqueues it, `u` enqueues it and says that the message is parked unless it touches one row,
//! `s` opens a savepoint, `r` rolls back to it, `l` releases it, `d` drops it, `o` opens one and
//! forgets the one before, `w` computes for more than a second. What a step is answered changes
//! nothing, but a savepoint that is not opened, which is a trap. Afterwards the component answers by
//! the first letter of the content type: `n` ok, `x` a trap, `f` other, `j` reject.

use anyhow::Result;
use oncebox_model::{policy::Limits, record::Record};
use oncebox_runtime::{
    ComponentHandler, HandlerSettings, RuntimeConfig, WasmRuntime, encode_component,
};

/// The component.
const INTERPRETER: &str = r#"(module
  (import "oncebox:handler/sql@0.1.0" "execute" (func $execute (param i32 i32 i32 i32 i32)))
  (import "oncebox:handler/sql@0.2.0" "enqueue" (func $enqueue (param i32 i32 i32 i32 i32 i64 i32 i32 i64 i32)))
  (import "oncebox:handler/sql@0.1.0" "[static]savepoint.open" (func $open (param i32)))
  (import "oncebox:handler/sql@0.1.0" "[method]savepoint.rollback" (func $rollback (param i32 i32)))
  (import "oncebox:handler/sql@0.1.0" "[method]savepoint.release" (func $release (param i32 i32)))
  (import "oncebox:handler/sql@0.1.0" "[resource-drop]savepoint" (func $drop (param i32)))
  (memory (export "memory") 4)
  (data (i32.const 2048) "words")
  (global $next (mut i32) (i32.const 16384))
  (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and (i32.add (global.get $next) (i32.const 7)) (i32.const -8)))
    (global.set $next (i32.add (local.get $at) (local.get 3)))
    (local.get $at))
  (func $step (param $at i32) (local $op i32) (local $left i64)
    (local.set $op (i32.load8_u (i32.load (local.get $at))))
    (if (i32.eq (local.get $op) (i32.const 101)) (then
      (call $execute (i32.load offset=8 (local.get $at)) (i32.load offset=12 (local.get $at)) (i32.const 0) (i32.const 0) (i32.const 256))))
    (if (i32.eq (local.get $op) (i32.const 119)) (then
      (local.set $left (i64.const 4000000000))
      (loop $again (br_if $again (i64.ne (local.tee $left (i64.sub (local.get $left) (i64.const 1))) (i64.const 0))))))
    (if (i32.eq (local.get $op) (i32.const 113)) (then
      (call $enqueue (i32.load offset=8 (local.get $at)) (i32.load offset=12 (local.get $at)) (i32.const 0) (i32.const 0) (i32.const 0) (i64.const 0) (i32.const 0) (i32.const 0) (i64.const 0) (i32.const 256))))
    (if (i32.eq (local.get $op) (i32.const 117)) (then
      (call $enqueue (i32.load offset=8 (local.get $at)) (i32.load offset=12 (local.get $at)) (i32.const 0) (i32.const 0) (i32.const 1) (i64.const 1) (i32.const 2) (i32.const 2048) (i64.const 5) (i32.const 256))))
    (if (i32.eq (local.get $op) (i32.const 115)) (then
      (call $open (i32.const 512))
      (if (i32.load8_u (i32.const 512)) (then unreachable))
      (i32.store (i32.const 1024) (i32.load (i32.const 516)))))
    (if (i32.eq (local.get $op) (i32.const 114)) (then (call $rollback (i32.load (i32.const 1024)) (i32.const 512))))
    (if (i32.eq (local.get $op) (i32.const 108)) (then (call $release (i32.load (i32.const 1024)) (i32.const 512))))
    (if (i32.eq (local.get $op) (i32.const 100)) (then (call $drop (i32.load (i32.const 1024)))))
    (if (i32.eq (local.get $op) (i32.const 111)) (then
      (call $open (i32.const 512)))))
  (func (export "oncebox:handler/incoming-handler@0.1.0#handle") (param $message i32) (result i32)
    (local $at i32) (local $left i32) (local $end i32)
    (local.set $at (i32.load offset=48 (local.get $message)))
    (local.set $left (i32.load offset=52 (local.get $message)))
    (block $done (loop $steps
      (br_if $done (i32.eqz (local.get $left)))
      (call $step (local.get $at))
      (local.set $at (i32.add (local.get $at) (i32.const 16)))
      (local.set $left (i32.sub (local.get $left) (i32.const 1)))
      (br $steps)))
    (local.set $end (i32.load8_u (i32.load offset=60 (local.get $message))))
    (if (i32.eq (local.get $end) (i32.const 120)) (then unreachable))
    (if (i32.ne (local.get $end) (i32.const 110)) (then
      (i32.store8 (i32.const 64) (i32.const 1))
      (i32.store8 (i32.const 72) (select (i32.const 1) (i32.const 3) (i32.eq (local.get $end) (i32.const 106))))
      (i32.store (i32.const 80) (i32.const 2048)) (i32.store (i32.const 84) (i32.const 5))))
    (i32.const 64)))"#;

/// A handler with the component and these limits.
pub async fn interpreter(limits: Limits) -> Result<ComponentHandler> {
    let runtime = WasmRuntime::new(RuntimeConfig { instances_max: 2, ..RuntimeConfig::default() })?;
    let component = runtime.load(&encode_component(&wat::parse_str(INTERPRETER)?)?).await?;
    let settings = HandlerSettings {
        version: 1,
        limits,
        config: vec![],
        random_key: [0; 32],
        may_emit: false,
    };
    Ok(runtime.handler(&component, settings))
}

/// A record of partition 0 of topic `t` with these steps.
pub fn record_of(offset: i64, id: &str, steps: &[(&str, String)], end: &str) -> Record {
    let own = [("id", id.to_owned()), ("content-type", end.to_owned())];
    let headers = own.iter().chain(steps);
    Record {
        headers: headers
            .map(|(name, text)| ((*name).to_owned(), text.clone().into_bytes()))
            .collect(),
        ..crate::inbox::record(offset, id, "")
    }
}
