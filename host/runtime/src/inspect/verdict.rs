//! Verdict on a component: its world, or its problems in words for its author.

use oncebox_model::{
    Problem,
    contract::{CONTRACT, CONTRACT_0_2, is_given, is_of_0_2},
};

use super::{
    Allowance, quoted,
    scan::{ComponentExport, ComponentImport, Scan},
};
use crate::{
    component::{BATCH, SINGLE, is_same_interface},
    engine::{
        CORE_INSTANCES_MAX, MEMORIES_MAX, MEMORIES_OF_MODULE_MAX, TABLE_ELEMENTS_MAX, TABLES_MAX,
        TABLES_OF_MODULE_MAX,
    },
};

/// Most refused imports, or exports, that are listed one by one.
const LISTED_MAX: usize = 20;
/// Versions of the contract that this host has.
const VERSIONS: &str = "0.1, and `emit`, `sql` and `trace` of 0.2";
const NO_NETWORK: &str =
    "a handler has no network; what it is to read must be in the message or in its tables";

/// The world of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HandlerWorld {
    /// Whether the handler takes all messages of a transaction together.
    pub(super) is_batch: bool,
    /// Version of the contract that the component was built against: that of an import of version
    /// 0.2, else that of the handler interface that it exports.
    pub(super) contract: String,
}

/// Returns the world of a component, or all its problems.
pub(super) fn verdict(scan: &Scan, allowance: &Allowance) -> Result<HandlerWorld, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut world = exported(&scan.exports).map_err(|problem| problems.push(problem)).ok();
    let newer = scan.imports.iter().find(|import| is_of_0_2(&import.name));
    if let (Some(world), Some(newer)) = (&mut world, newer) {
        version(&newer.name).clone_into(&mut world.contract);
    }
    let refused: Vec<_> =
        scan.imports.iter().filter_map(|import| refusal(import, scan.has_shared_libc)).collect();
    let more = refused.len().saturating_sub(LISTED_MAX);
    problems.extend(refused.into_iter().take(LISTED_MAX));
    if more > 0 {
        problems.push(Problem::new(
            "import_not_given",
            format!("and {more} more imports that a handler is not given"),
        ));
    }
    if world.as_ref().is_some_and(|world| world.is_batch) {
        problems.extend(
            scan.imports
                .iter()
                .find(|import| import.name.starts_with("oncebox:handler/context@"))
                .map(context_in_batch),
        );
    }
    problems.extend(excess_resources(scan, allowance));
    match world {
        Some(world) if problems.is_empty() => Ok(world),
        _ => Err(problems),
    }
}

fn version(name: &str) -> &str {
    name.split_once('@').map_or("", |(_, version)| version)
}

/// Finds the handler interface among the exports. A component with both interfaces runs in batches.
fn exported(exports: &[ComponentExport]) -> Result<HandlerWorld, Problem> {
    for (wanted, is_batch, function) in [(BATCH, true, "handle-batch"), (SINGLE, false, "handle")] {
        let Some(export) = exports.iter().find(|export| is_same_interface(&export.name, wanted))
        else {
            continue;
        };
        let has_function = export
            .functions
            .as_ref()
            .is_some_and(|functions| functions.iter().any(|name| name == function));
        if !has_function {
            let text = format!(
                "the export `{}` has no function `{function}`; build the component against the \
                    `wit` folder of this release",
                quoted(&export.name)
            );
            return Err(Problem::new("wrong_export", text));
        }
        return Ok(HandlerWorld { is_batch, contract: version(&export.name).to_owned() });
    }
    let ours = exports.iter().find(|export| export.name.starts_with("oncebox:handler/"));
    Err(ours.map_or_else(|| missing(exports), |export| other_version(&export.name)))
}

fn missing(exports: &[ComponentExport]) -> Problem {
    let names: Vec<String> = exports
        .iter()
        .take(LISTED_MAX)
        .map(|export| format!("`{}`", quoted(&export.name)))
        .collect();
    let has = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
    let is_command = exports.iter().any(|export| export.name.starts_with("wasi:cli/run@"));
    let hint = if is_command {
        "; this is a program with a `main`, and a handler is a library (for Rust: `crate-type = \
            [\"cdylib\"]`)"
    } else {
        ""
    };
    let text = format!(
        "the component does not handle messages: it must export `{SINGLE}` or `{BATCH}`, and it \
            exports {has}{hint}; \
         `oncebox new` writes a project that does"
    );
    Problem::new("missing_export", text)
}

fn other_version(name: &str) -> Problem {
    let text = format!(
        "`{}` is of another version of the contract; this host has {VERSIONS}; build the component \
            against the `wit` folder of this release",
        quoted(name)
    );
    Problem::new("contract_version", text)
}

/// Returns the problem of an import that handlers are not given.
///
/// A C library that is linked as a shared library imports all of `wasi:sockets`, even if the
/// program does not use it. Python's tools link it so. The host links these imports and refuses
/// every socket. In any other component the program itself wants the import, and would fail only
/// when the first message needs it.
fn refusal(import: &ComponentImport, has_shared_libc: bool) -> Option<Problem> {
    let name = quoted(&import.name);
    let interface =
        import.name.split_once('@').map_or(import.name.as_str(), |(interface, _)| interface);
    if is_given(&import.name) && import.is_interface {
        return match is_network(interface) && !has_shared_libc {
            true => Some(not_given(&name, NO_NETWORK)),
            false => None,
        };
    }
    if !import.is_interface {
        return Some(not_given(
            &name,
            "a handler imports whole interfaces of the contract, not functions of a host of its \
                own",
        ));
    }
    let (package, own) = interface.split_once('/').unwrap_or((interface, ""));
    let is_newer = CONTRACT_0_2.contains(&own);
    match package {
        "oncebox:handler" if version(&import.name).starts_with("0.1.") && !is_newer => {
            let ours =
                CONTRACT.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            Some(not_given(&name, &format!("the contract has no such interface; it has {ours}")))
        }
        "oncebox:handler" => Some(other_version(&import.name)),
        _ => Some(not_given(&name, why_not(package, &import.name))),
    }
}

fn not_given(name: &str, why: &str) -> Problem {
    Problem::new("import_not_given", format!("the import `{name}` is not given to handlers: {why}"))
}

/// Returns whether an interface opens connections. `network`, `tcp` and `udp` alone only name
/// types, which a C library mentions in its table of files.
fn is_network(interface: &str) -> bool {
    let name = interface.strip_prefix("wasi:sockets/");
    name.is_some_and(|name| {
        ["instance-network", "ip-name-lookup", "tcp-create-socket", "udp-create-socket"]
            .contains(&name)
    })
}

fn why_not(package: &str, import: &str) -> &'static str {
    const OTHER_WASI: &str =
        "it is of another version of WASI; build for WASI 0.2 or `wasm32-unknown-unknown`";
    match package {
        "wasi:http" | "wasi:tls" | "wasi:sockets" => NO_NETWORK,
        "wasi:filesystem" => {
            "a handler has no files; keep data in its tables and settings in `config`"
        }
        "wasi:io" | "wasi:cli" | "wasi:clocks" | "wasi:random"
            if !version(import).starts_with("0.2.") =>
        {
            OTHER_WASI
        }
        "wasi:keyvalue" | "wasi:blobstore" | "wasi:sql" => {
            "a handler keeps its data in its tables, through `oncebox:handler/sql`"
        }
        "wasi:messaging" => {
            "a handler sends messages through `oncebox:handler/emit`, with the transaction of the \
                message it handles"
        }
        "wasi:config" | "wasi:runtime-config" => {
            "a handler reads its settings through `oncebox:handler/config`"
        }
        "wasi:logging" => {
            "a handler logs through `oncebox:handler/log`, standard output or standard error"
        }
        "wasi:nn" | "wasi:webgpu" | "wasi:threads" => "this host has no such device",
        _ => {
            "this host does not know it; a handler has SQL, a log, its settings and a minimal WASI \
                0.2, and no other host functions"
        }
    }
}

fn context_in_batch(import: &ComponentImport) -> Problem {
    let text = format!(
        "the component exports `{BATCH}` and imports `{}`, which speaks of one message; take what \
            it needs from the messages",
        quoted(&import.name)
    );
    Problem::new("context_in_batch", text)
}

/// Returns a problem for each resource of which an instance takes more than the pool has.
fn excess_resources(scan: &Scan, allowance: &Allowance) -> Vec<Problem> {
    let resources = scan.resources;
    let memory_max = allowance.memory_bytes_max as u64;
    let counts = [
        (
            "too_many_memories",
            "linear memories in one module",
            resources.memories_of_module,
            u64::from(MEMORIES_OF_MODULE_MAX),
            "use one",
        ),
        (
            "too_many_tables",
            "tables in one module",
            resources.tables_of_module,
            u64::from(TABLES_OF_MODULE_MAX),
            "use one",
        ),
        (
            "too_many_memories",
            "linear memories",
            resources.memories,
            u64::from(MEMORIES_MAX),
            "link the modules so that they share one",
        ),
        (
            "too_much_memory",
            "bytes of memory at its start",
            resources.memory_bytes,
            memory_max,
            "reduce the memory that it begins with, or raise `limits.memory_bytes` of its consumer \
                if that is the bound",
        ),
        (
            "too_many_tables",
            "tables",
            resources.tables,
            u64::from(TABLES_MAX),
            "link the modules so that they share one",
        ),
        (
            "table_too_large",
            "elements in one table",
            resources.table_elements,
            TABLE_ELEMENTS_MAX as u64,
            "reduce the number of functions",
        ),
        (
            "too_many_core_instances",
            "core instances",
            resources.core_instances,
            u64::from(CORE_INSTANCES_MAX),
            "link the modules into fewer",
        ),
    ];
    let over = counts.into_iter().filter(|(_, _, needed, max, _)| needed > max);
    over.map(|(code, what, needed, max, advice)| {
        Problem::new(
            code,
            format!("the component needs {needed} {what} and may have {max}; {advice}"),
        )
    })
    .collect()
}
