//! Guests as text, so that no toolchain is needed: each does a list of steps, whatever they answer,
//! and ends in one way.
//!
//! Their memory: the answer at 64, what a call returns at 256, the savepoint that was opened last
//! at 512, one parameter at 1024, what is emitted at 2048, texts from 4096 on, and behind them what
//! is allocated.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use oncebox_runtime::{RuntimeConfig, WasmRuntime};

use crate::services::target_dir;

/// Where texts begin.
const TEXTS: usize = 4096;
const PAGE: usize = 65_536;

/// A runtime that compiles what no test before it did, as a host does: a Python runtime takes ten
/// seconds.
pub fn runtime() -> Result<WasmRuntime> {
    Ok(WasmRuntime::new(RuntimeConfig {
        instances_max: 4,
        cache_dir: Some(target_dir().join("test-hosts/cache")),
        ..RuntimeConfig::default()
    })?)
}

/// Folder of the artifacts of the examples, among them the standard library, and the flags that
/// they were compiled with: with others it would be compiled once more.
pub fn rust_artifacts() -> (PathBuf, String) {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples");
    let flags = Command::new(examples.join("build.sh")).arg("flags").output().expect("build.sh");
    assert!(flags.status.success(), "{}", String::from_utf8_lossy(&flags.stderr));
    let folder = examples.canonicalize().expect("the examples").join("target");
    (folder, String::from_utf8(flags.stdout).expect("flags"))
}

/// One thing that a guest does. What it is answered changes nothing of what it does next, but for
/// [`Step::GiveUpOnError`].
#[derive(Debug, Clone)]
pub enum Step {
    /// A statement for its effect.
    Execute(String),
    /// A statement for its rows.
    Query(String),
    /// A statement with so many text parameters of so many bytes.
    ExecuteWith(String, usize, usize),
    /// A statement with the message id as its parameter.
    ExecuteWithId(String),
    /// A statement for its effect, with the payload as its parameter, which is text.
    ExecuteWithPayload(String),
    /// A statement for its rows, with the payload as its parameter.
    QueryWithPayload(String),
    /// A statement for its effect, with the first value of the rows read last, a bigint, plus so
    /// much as its first parameter, and the payload as its second.
    ExecuteWithSum(String, i64),
    /// Answer `other("gave up")` here when the last statement failed.
    GiveUpOnError,
    /// Open a savepoint.
    Savepoint,
    /// Go back to the last savepoint.
    RollBack,
    /// Let the last savepoint go.
    Release,
    /// A line into the log.
    Log(String),
    /// Emit an outgoing message.
    Emit(Emit),
    /// Cancel what the consumer emitted with a token.
    Cancel(String),
    /// Begin a span of this name, and keep it in a slot, 0 to 7.
    Span(u32, &'static str),
    /// Add an attribute to the span in a slot.
    SpanAttribute(u32, &'static str, String),
    /// Mark the span in a slot as failed.
    FailSpan(u32, &'static str),
    /// End the span in a slot.
    EndSpan(u32),
    /// A step so many times; for ever with `u32::MAX`.
    Repeat(u32, Box<Step>),
    /// Anything else, as instructions.
    Wat(String),
}

/// What a guest emits: its own message's payload, under another type.
#[derive(Debug, Clone, Default)]
pub struct Emit {
    /// `kafka:<topic>` or `inbox:<consumer>`.
    pub destination: String,
    /// The event type.
    pub event_type: String,
    /// Whether it has the key of the guest's message.
    pub has_key: bool,
    /// Milliseconds until it is due; none is now.
    pub after_ms: Option<u64>,
    /// Names it for a cancel.
    pub cancel_token: Option<String>,
}

impl Emit {
    /// An outgoing message that is due now, has the key of the guest's message, and no token.
    pub fn to(destination: impl Into<String>, event_type: &str) -> Self {
        let (destination, event_type) = (destination.into(), event_type.to_owned());
        Self { destination, event_type, has_key: true, ..Self::default() }
    }
}

/// How a guest ends.
#[derive(Debug, Clone)]
pub enum End {
    /// Ok, without a result.
    Ok,
    /// Ok with these bytes as its result, JSON or not, UTF-8 or not.
    Result(Vec<u8>),
    /// Run again, after milliseconds of its own choice.
    Retry(Option<u64>),
    /// Reject.
    Reject(String),
    /// Park.
    Park(String),
    /// Anything else.
    Other(String),
    /// Instructions that leave the address of an answer.
    Wat(String),
}

/// `unreachable`, which is what a panic becomes.
pub fn trap() -> Step {
    Step::Wat("unreachable".to_owned())
}

/// A loop without an end.
pub fn spin() -> Step {
    Step::Wat("(loop $again (br $again))".to_owned())
}

/// A statement for its effect.
pub fn execute(sql: impl Into<String>) -> Step {
    Step::Execute(sql.into())
}

/// A component that does these steps and ends like this.
pub fn component(steps: &[Step], end: &End) -> Vec<u8> {
    encode(&text(steps, end))
}

/// A component made of the text of a core module.
pub fn encode(text: &str) -> Vec<u8> {
    let core = wat::parse_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    oncebox_runtime::encode_component(&core).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The core module's text.
pub fn text(steps: &[Step], end: &End) -> String {
    let mut texts = Texts::default();
    let emission = if steps.iter().any(emits) { EMIT } else { "" };
    let spans = if steps.iter().any(has_spans) { TRACE } else { "" };
    let steps: String = steps.iter().map(|step| instructions(step, &mut texts)).collect();
    let gave_up = answer(&End::Other("gave up".to_owned()), &mut texts);
    let end = answer(end, &mut texts);
    let (data, allocated) = (texts.segments(), TEXTS + texts.bytes.len());
    let pages = allocated / PAGE + 2;
    format!(
        r#"(module
  (import "oncebox:handler/sql@0.1.0" "execute" (func $execute (param i32 i32 i32 i32 i32)))
  (import "oncebox:handler/sql@0.1.0" "query" (func $query (param i32 i32 i32 i32 i32)))
  (import "oncebox:handler/sql@0.1.0" "[static]savepoint.open" (func $open (param i32)))
  (import "oncebox:handler/sql@0.1.0" "[method]savepoint.rollback" (func $rollback (param i32 i32)))
  (import "oncebox:handler/sql@0.1.0" "[method]savepoint.release" (func $release (param i32 i32)))
  (import "oncebox:handler/sql@0.1.0" "[resource-drop]savepoint" (func $drop (param i32)))
  (import "oncebox:handler/log@0.1.0" "log" (func $log (param i32 i32 i32)))
  {emission}
  {spans}
  (memory (export "memory") {pages})
  {data}
  (global $next (mut i32) (i32.const {allocated}))
  (func $allocate (export "cabi_realloc") (param i32 i32 i32) (param $size i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and (i32.add (global.get $next) (i32.const 7)) (i32.const -8)))
    (global.set $next (i32.add (local.get $at) (local.get $size)))
    (block $enough
      (br_if $enough (i32.le_u (global.get $next) (i32.mul (memory.size) (i32.const {PAGE}))))
      (br_if $enough (i32.ne (memory.grow (i32.add (i32.div_u (local.get $size) (i32.const {PAGE})) (i32.const 1))) (i32.const -1)))
      unreachable)
    (local.get $at))
  (func $texts (param $count i32) (param $size i32) (result i32)
    (local $list i32) (local $text i32) (local $at i32)
    (local.set $text (call $allocate (i32.const 0) (i32.const 0) (i32.const 1) (local.get $size)))
    (memory.fill (local.get $text) (i32.const 120) (local.get $size))
    (local.set $list (call $allocate (i32.const 0) (i32.const 0) (i32.const 8) (i32.mul (local.get $count) (i32.const 24))))
    (local.set $at (local.get $list))
    (block $done (loop $more
      (br_if $done (i32.eqz (local.get $count)))
      (i32.store8 (local.get $at) (i32.const 8))
      (i32.store offset=8 (local.get $at) (local.get $text))
      (i32.store offset=12 (local.get $at) (local.get $size))
      (local.set $at (i32.add (local.get $at) (i32.const 24)))
      (local.set $count (i32.sub (local.get $count) (i32.const 1)))
      (br $more)))
    (local.get $list))
  (func (export "oncebox:handler/incoming-handler@0.1.0#handle") (param $message i32) (result i32)
    (local $left i32)
    (block $gave_up
      {steps}
      {end}
      (return))
    {gave_up}))"#
    )
}

/// Imports of a guest that emits. Others have none of them, since they need a grant.
const EMIT: &str = r#"(import "oncebox:handler/emit@0.2.0" "emit" (func $emit (param i32 i32)))
  (import "oncebox:handler/emit@0.2.0" "cancel" (func $cancel (param i32 i32 i32)))"#;

/// Imports of a guest with spans of its own.
const TRACE: &str = r#"(import "oncebox:handler/trace@0.2.0" "[constructor]span" (func $span (param i32 i32) (result i32)))
  (import "oncebox:handler/trace@0.2.0" "[method]span.set-attribute" (func $set (param i32 i32 i32 i32 i32)))
  (import "oncebox:handler/trace@0.2.0" "[method]span.fail" (func $fail (param i32 i32 i32)))
  (import "oncebox:handler/trace@0.2.0" "[resource-drop]span" (func $end (param i32)))"#;

/// Returns whether a step is about a span.
fn has_spans(step: &Step) -> bool {
    match step {
        Step::Span(..) | Step::SpanAttribute(..) | Step::FailSpan(..) | Step::EndSpan(_) => true,
        Step::Repeat(_, step) => has_spans(step),
        _ => false,
    }
}

/// Returns whether a step calls what needs the grant.
fn emits(step: &Step) -> bool {
    match step {
        Step::Emit(_) | Step::Cancel(_) => true,
        Step::Repeat(_, step) => emits(step),
        _ => false,
    }
}

/// The texts of a module, one behind the other.
#[derive(Default)]
struct Texts {
    bytes: Vec<u8>,
}

impl Texts {
    /// Address and length, as operands.
    fn put(&mut self, text: &[u8]) -> String {
        let at = TEXTS + self.bytes.len();
        self.bytes.extend_from_slice(text);
        format!("(i32.const {at}) (i32.const {})", text.len())
    }

    /// Code that writes address and length of a text to a place in memory.
    fn put_at(&mut self, place: u32, text: &[u8]) -> String {
        let at = TEXTS + self.bytes.len();
        self.bytes.extend_from_slice(text);
        let (next, length) = (place + 4, text.len());
        format!(
            "(i32.store (i32.const {place}) (i32.const {at})) (i32.store (i32.const {next}) \
                (i32.const {length}))"
        )
    }

    fn segments(&self) -> String {
        let mut escaped = String::with_capacity(3 * self.bytes.len());
        for byte in &self.bytes {
            let _ = write!(escaped, "\\{byte:02x}"); // writing to a string cannot fail
        }
        format!("(data (i32.const {TEXTS}) \"{escaped}\")")
    }
}

fn instructions(step: &Step, texts: &mut Texts) -> String {
    const NO_PARAMS: &str = "(i32.const 0) (i32.const 0)";
    const ANSWER: &str = "(i32.const 256)";
    match step {
        Step::Execute(sql) => {
            format!("(call $execute {} {NO_PARAMS} {ANSWER})", texts.put(sql.as_bytes()))
        }
        Step::Query(sql) => {
            format!("(call $query {} {NO_PARAMS} {ANSWER})", texts.put(sql.as_bytes()))
        }
        Step::ExecuteWith(sql, count, size) => format!(
            "(call $execute {} (call $texts (i32.const {count}) (i32.const {size})) (i32.const \
                {count}) {ANSWER})",
            texts.put(sql.as_bytes())
        ),
        Step::ExecuteWithId(sql) => format!(
            "(i32.store8 (i32.const 1024) (i32.const 8)) (i64.store (i32.const 1032) (i64.load \
                (local.get $message))) \
             (call $execute {} (i32.const 1024) (i32.const 1) {ANSWER})",
            texts.put(sql.as_bytes())
        ),
        Step::ExecuteWithPayload(sql) => {
            format!(
                "{} (call $execute {} (i32.const 1024) (i32.const 1) {ANSWER})",
                payload_at(1024),
                texts.put(sql.as_bytes())
            )
        }
        Step::QueryWithPayload(sql) => {
            format!(
                "{} (call $query {} (i32.const 1024) (i32.const 1) {ANSWER})",
                payload_at(1024),
                texts.put(sql.as_bytes())
            )
        }
        Step::ExecuteWithSum(sql, plus) => format!(
            "(i32.store8 (i32.const 1024) (i32.const 4)) (i64.store (i32.const 1032) (i64.add \
                (i64.const {plus}) \
             (i64.load offset=8 (i32.load (i32.load (i32.const 268)))))) {} \
             (call $execute {} (i32.const 1024) (i32.const 2) {ANSWER})",
            payload_at(1048),
            texts.put(sql.as_bytes())
        ),
        Step::GiveUpOnError => "(br_if $gave_up (i32.load8_u (i32.const 256)))".to_owned(),
        Step::Savepoint => {
            "(call $open (i32.const 256)) (i32.store (i32.const 512) (i32.load (i32.const 260)))"
                .to_owned()
        }
        Step::RollBack => format!("(call $rollback (i32.load (i32.const 512)) {ANSWER})"),
        Step::Release => format!("(call $release (i32.load (i32.const 512)) {ANSWER})"),
        Step::Log(line) => format!("(call $log (i32.const 2) {})", texts.put(line.as_bytes())),
        Step::Emit(emit) => emission(emit, texts),
        Step::Cancel(token) => format!("(call $cancel {} {ANSWER})", texts.put(token.as_bytes())),
        Step::Span(slot, name) => {
            format!("(i32.store {} (call $span {}))", span_at(*slot), texts.put(name.as_bytes()))
        }
        Step::SpanAttribute(slot, key, value) => format!(
            "(call $set (i32.load {}) {} {})",
            span_at(*slot),
            texts.put(key.as_bytes()),
            texts.put(value.as_bytes())
        ),
        Step::FailSpan(slot, error_type) => format!(
            "(call $fail (i32.load {}) {})",
            span_at(*slot),
            texts.put(error_type.as_bytes())
        ),
        Step::EndSpan(slot) => format!("(call $end (i32.load {}))", span_at(*slot)),
        Step::Repeat(count, step) => format!(
            "(local.set $left (i32.const {count})) (loop $again {} \
             (local.set $left (i32.sub (local.get $left) (i32.const 1))) (br_if $again (local.get \
             $left)))",
            instructions(step, texts)
        ),
        Step::Wat(text) => text.clone(),
    }
}

/// Where the handle of the span in a slot is kept.
fn span_at(slot: u32) -> String {
    format!("(i32.const {})", 3_072 + 4 * slot)
}

/// Code that calls `emit`. Its parameters are too many to be passed one by one: they are a record
/// in memory of destination, outgoing message and options, one behind the other. Key and payload are
/// those of the message that the guest was called with.
fn emission(emit: &Emit, texts: &mut Texts) -> String {
    const PARAMETERS: u32 = 2048;
    let byte = |place: u32, value: &str| {
        format!("(i32.store8 (i32.const {}) {value})", PARAMETERS + place)
    };
    let one = "(i32.const 1)";
    let of_message = |is_some: u32, value: u32, from_is_some: u32, from_value: u32| {
        let load = format!("(i32.load8_u offset={from_is_some} (local.get $message))");
        format!(
            "{} (i64.store (i32.const {}) (i64.load offset={from_value} (local.get $message)))",
            byte(is_some, &load),
            PARAMETERS + value
        )
    };
    let mut code = format!("(memory.fill (i32.const {PARAMETERS}) (i32.const 0) (i32.const 104))");
    let mut push = |part: String| {
        code.push(' ');
        code.push_str(&part);
    };
    push(texts.put_at(PARAMETERS, emit.destination.as_bytes()));
    push(texts.put_at(PARAMETERS + 8, emit.event_type.as_bytes()));
    push(of_message(36, 40, 68, 72)); // payload
    if emit.has_key {
        push(of_message(48, 52, 24, 28));
    }
    if let Some(after_ms) = emit.after_ms {
        push(byte(64, one));
        push(format!("(i64.store (i32.const {}) (i64.const {after_ms}))", PARAMETERS + 72));
    }
    if let Some(token) = &emit.cancel_token {
        push(byte(80, one));
        push(texts.put_at(PARAMETERS + 84, token.as_bytes()));
    }
    push(format!("(call $emit (i32.const {PARAMETERS}) (i32.const 256))"));
    code
}

/// Code that writes the payload as a parameter. In the message's memory its address and length
/// stand behind seven other members.
fn payload_at(parameter: u32) -> String {
    let value = parameter + 8;
    format!(
        "(i32.store8 (i32.const {parameter}) (i32.const 8)) (i64.store (i32.const {value}) \
            (i64.load offset=72 (local.get $message)))"
    )
}

/// Code that writes a `result<option<string>, failure>` and leaves its address.
fn answer(end: &End, texts: &mut Texts) -> String {
    let byte = |at: u32, value: u32| format!("(i32.store8 (i32.const {at}) (i32.const {value}))");
    let mut text_at = |at: u32, text: &[u8]| {
        let [address, length] = [TEXTS + texts.bytes.len(), text.len()];
        texts.put(text);
        format!(
            "(i32.store (i32.const {at}) (i32.const {address})) (i32.store (i32.const {}) \
                (i32.const {length}))",
            at + 4
        )
    };
    let fields = match end {
        End::Ok => String::new(),
        End::Result(bytes) => format!("{} {}", byte(72, 1), text_at(76, bytes)),
        End::Retry(None) => byte(64, 1),
        End::Retry(Some(delay)) => format!(
            "{} {} (i64.store (i32.const 88) (i64.const {delay}))",
            byte(64, 1),
            byte(80, 1)
        ),
        End::Reject(text) => {
            format!("{} {} {}", byte(64, 1), byte(72, 1), text_at(80, text.as_bytes()))
        }
        End::Park(text) => {
            format!("{} {} {}", byte(64, 1), byte(72, 2), text_at(80, text.as_bytes()))
        }
        End::Other(text) => {
            format!("{} {} {}", byte(64, 1), byte(72, 3), text_at(80, text.as_bytes()))
        }
        End::Wat(text) => return text.clone(),
    };
    format!("{fields} (i32.const 64)")
}
