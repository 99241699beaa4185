//! Guests as text. Each writes its answer, a `result<option<string>, failure>`, to address 64.

/// Returns a module with `imports`, a memory, an allocator and a handler with this body.
pub(super) fn guest(imports: &str, body: &str) -> String {
    format!(
        r#"(module
  {imports}
  (memory (export "memory") 4)
  (global $next (mut i32) (i32.const 16384))
  (func (export "cabi_realloc") (param $old i32) (param $old_size i32) (param $align i32) (param $size i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and (i32.add (global.get $next) (i32.const 7)) (i32.const -8)))
    (global.set $next (i32.add (local.get $at) (local.get $size)))
    (local.get $at))
  (func $spin (loop $again (br $again)))
  (func (export "oncebox:handler/incoming-handler@0.1.0#handle") (param $message i32) (result i32)
    {body})
)"#
    )
}

/// Code that answers ok without a result.
pub(super) const OK: &str = "(i32.const 64)";

/// Returns code that answers ok with a result.
pub(super) fn ok_with(result: &str) -> String {
    format!(
        "{} (i32.store8 (i32.const 72) (i32.const 1)) {} (i32.const 64)",
        stores(4096, result),
        pair(76, 4096, result.len())
    )
}

/// Returns code that answers with a failure of this case and text.
pub(super) fn fail_with(case: u32, text: &str) -> String {
    format!(
        "{} (i32.store8 (i32.const 64) (i32.const 1)) (i32.store8 (i32.const 72) (i32.const \
            {case})) {} (i32.const 64)",
        stores(4096, text),
        pair(80, 4096, text.len())
    )
}

/// Returns code that writes a text to memory.
pub(super) fn stores(at: usize, text: &str) -> String {
    text.bytes()
        .enumerate()
        .map(|(i, byte)| format!("(i32.store8 (i32.const {}) (i32.const {byte}))", at + i))
        .collect()
}

/// Returns code that stores an address and a length.
fn pair(at: usize, address: usize, length: usize) -> String {
    format!(
        "(i32.store (i32.const {at}) (i32.const {address})) (i32.store (i32.const {}) (i32.const \
            {length}))",
        at + 4
    )
}

/// The import of `sql.execute`.
pub(super) const EXECUTE: &str =
    r#"(import "oncebox:handler/sql@0.1.0" "execute" (func $execute (param i32 i32 i32 i32 i32)))"#;

/// Returns code that sends a statement without parameters. The answer goes to address 256.
pub(super) fn execute(statement: &str) -> String {
    format!(
        "{} (call $execute (i32.const 2048) (i32.const {}) (i32.const 0) (i32.const 0) (i32.const \
            256))",
        stores(2048, statement),
        statement.len()
    )
}

/// The import of `log.log`.
pub(super) const LOG: &str =
    r#"(import "oncebox:handler/log@0.1.0" "log" (func $log (param i32 i32 i32)))"#;
