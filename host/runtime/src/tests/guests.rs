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

/// The imports of `emit`.
pub(super) const EMIT: &str = r#"(import "oncebox:handler/emit@0.2.0" "emit" (func $emit (param i32 i32)))
  (import "oncebox:handler/emit@0.2.0" "cancel" (func $cancel (param i32 i32 i32)))"#;

/// An emit of a guest: an event without headers and payload.
#[derive(Clone, Copy, Default)]
pub(super) struct GuestEmit<'a> {
    pub(super) destination: &'a str,
    pub(super) event_type: &'a str,
    pub(super) key: Option<&'a str>,
    pub(super) after_ms: Option<u64>,
    pub(super) token: Option<&'a str>,
    /// Index of the message of a batch that causes it, by its id; none for no cause.
    pub(super) cause: Option<u32>,
}

/// Address of the parameters of `emit`, which are too many to be passed one by one: destination,
/// message and options, one behind the other.
const EMIT_PARAMETERS: usize = 1024;
/// Bytes of the parameters of `emit`.
const EMIT_PARAMETERS_BYTES: usize = 104;
/// Bytes of a message in a guest's list.
const MESSAGE_BYTES: u32 = 80;

/// Returns code that emits. The answer goes to address 256.
pub(super) fn emit(emit: GuestEmit<'_>) -> String {
    let at = |offset: usize| EMIT_PARAMETERS + offset;
    let some = |offset: usize| format!("(i32.store8 (i32.const {}) (i32.const 1))", at(offset));
    let text = |offset: usize, place: usize, text: &str| {
        format!("{} {}", stores(place, text), pair(at(offset), place, text.len()))
    };
    let mut code = vec![
        format!(
            "(memory.fill (i32.const {EMIT_PARAMETERS}) (i32.const 0) (i32.const \
                {EMIT_PARAMETERS_BYTES}))"
        ),
        text(0, 8192, emit.destination),
        text(8, 9000, emit.event_type),
    ];
    if let Some(key) = emit.key {
        code.extend([some(48), text(52, 10_000, key)]);
    }
    if let Some(after_ms) = emit.after_ms {
        code.push(some(64));
        code.push(format!("(i64.store (i32.const {}) (i64.const {after_ms}))", at(72)));
    }
    if let Some(token) = emit.token {
        code.extend([some(80), text(84, 11_000, token)]);
    }
    if let Some(index) = emit.cause {
        let id = index * MESSAGE_BYTES;
        code.push(some(92));
        code.push(format!(
            "(i64.store (i32.const {}) (i64.load offset={id} (local.get $messages)))",
            at(96)
        ));
    }
    code.push(format!("(call $emit (i32.const {EMIT_PARAMETERS}) (i32.const 256))"));
    code.join(" ")
}

/// Returns code that cancels. The answer goes to address 256.
pub(super) fn cancel(token: &str) -> String {
    format!(
        "{} (call $cancel (i32.const 11000) (i32.const {}) (i32.const 256))",
        stores(11_000, token),
        token.len()
    )
}

/// Code that ends the guest when the last call was not answered with ok.
pub(super) const MUST_BE_OK: &str = "(if (i32.load8_u (i32.const 256)) (then unreachable))";

/// Returns a module like [`guest`] that takes batches and answers ok for every message of one.
pub(super) fn batch_guest(imports: &str, body: &str) -> String {
    let answers = "(i32.store (i32.const 64) (i32.const 12288)) (i32.store (i32.const 68) \
        (local.get $count)) (i32.const 64)";
    guest(imports, &format!("{body} {answers}")).replace(
        "oncebox:handler/incoming-handler@0.1.0#handle\") (param $message i32)",
        "oncebox:handler/incoming-batch-handler@0.1.0#handle-batch\") (param $messages i32) \
            (param $count i32)",
    )
}
