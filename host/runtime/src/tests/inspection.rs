//! Problems and reports of uploads, before anything is compiled.

use std::{fs, path::Path, time::Instant};

use oncebox_model::contract::is_emit;
use wasmtime::{Engine, component::Component};

use super::{
    component, config,
    guests::{EMIT, LOG, OK, cancel, guest},
};
use crate::{Allowance, Inspected, Problem, inspect};

/// Examples that send messages, in whatever language.
const SENDING: [&str; 3] = ["order-events", "order-saga", "github-comments"];

fn inspect_default(bytes: &[u8]) -> Result<Inspected, Vec<Problem>> {
    inspect(bytes, &config().allowance())
}

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Checks that an upload has exactly these problems, each with a part of its text.
fn check(bytes: &[u8], expected: &[(&str, &str)]) {
    let problems = inspect_default(bytes).map(|_| ()).expect_err("it was taken");
    let codes: Vec<_> = problems.iter().map(|problem| problem.code.as_str()).collect();
    assert_eq!(codes, expected.iter().map(|(code, _)| *code).collect::<Vec<_>>(), "{problems:#?}");
    for (problem, (_, part)) in problems.iter().zip(expected) {
        println!("{}: {}", problem.code, problem.text);
        assert!(
            problem.text.contains(part) && !problem.text.contains('\n'),
            "`{}` lacks `{part}`",
            problem.text
        );
    }
}

/// Makes a component of these parts and a handler that does nothing.
fn handler(parts: &str) -> Vec<u8> {
    handler_of("oncebox:handler/incoming-handler@0.1.0", "handle", parts)
}

fn handler_of(interface: &str, function: &str, parts: &str) -> Vec<u8> {
    wat(&format!(
        r#"(component {parts}
        (core module $handler (func (export "f")))
        (core instance $handler (instantiate $handler))
        (func $f (canon lift (core func $handler "f")))
        (instance $e (export "{function}" (func $f)))
        (export "{interface}" (instance $e)))"#
    ))
}

#[test]
fn what_is_not_webassembly_is_told_what_it_is() {
    for (bytes, part) in [
        (&b""[..], "the file is empty"),
        (b"#!/bin/sh\necho", "not a WebAssembly file"),
        (b"\x7fELF\x02\x01\x01\0", "a program for Linux"),
        (b"(module)", "as text"),
        (b"\x1f\x8b\x08\0", "gzip"),
        (b"PK\x03\x04", "zip"),
        (b"\0asm", "cut off"),
    ] {
        check(bytes, &[("not_wasm", part)]);
    }
    let code = Engine::default().precompile_component(&handler("")).expect("code");
    check(&code, &[("precompiled", "machine code, which is never accepted")]);
}

#[test]
fn damage_is_told_with_its_place() {
    let sound = component(&guest("", OK));
    check(&sound[..sound.len() - 7], &[("invalid_wasm", "at byte")]);
    check(b"\0asm\x0d\0\x01\0garbage", &[("invalid_wasm", "at byte 10")]);
    // An addition without operands, which only the check of the body finds.
    let body = b"\0asm\x01\0\0\0\x01\x04\x01\x60\0\0\x03\x02\x01\0\x0a\x05\x01\x03\0\x6a\x0b";
    check(body, &[("invalid_wasm", "at byte 23")]);
}

#[test]
fn size_is_capped_before_anything_is_read() {
    let bytes = component(&guest("", OK));
    let small = Allowance { component_bytes_max: 10, ..config().allowance() };
    let problems = inspect(&bytes, &small).expect_err("too large");
    assert!(
        problems[0].code == "too_large" && problems[0].text.contains("component_bytes_max"),
        "{problems:?}"
    );
}

#[test]
fn core_modules_become_components_or_say_why_not() {
    let core = wat(&guest(LOG, OK));
    let inspected = inspect_default(&core).expect("sound");
    assert!(inspected.source_digest.is_some() && inspected.component != core);
    assert_eq!(inspected.component, component(&guest(LOG, OK)));
    let again = inspect_default(&inspected.component).expect("sound");
    assert_eq!((again.digest, again.source_digest), (inspected.digest, None));
    assert_eq!(again.report, inspected.report);
    check(&wat("(module)"), &[("core_module", "incoming-handler")]);
    check(&wat(&guest(r#"(import "env" "send" (func))"#, OK)), &[("core_module", "env")]);
}

#[test]
fn every_import_that_is_not_given_is_told_with_its_reason() {
    let imports = [
        ("wasi:http/outgoing-handler@0.2.0", "no network"),
        ("wasi:sockets/tcp-create-socket@0.2.9", "no network"),
        ("wasi:sockets/tcp@0.3.0", "no network"),
        ("wasi:filesystem/types@0.3.0", "no files"),
        ("wasi:io/streams@0.1.0", "another version of WASI"),
        ("wasi:keyvalue/store@0.2.0", "in its tables"),
        ("acme:things/engine", "does not know it"),
        ("oncebox:handler/secrets@0.1.0", "no such interface"),
    ];
    let parts: String =
        imports.iter().map(|(name, _)| format!("(import \"{name}\" (instance))")).collect();
    let parts = format!("{parts} (import \"launch\" (func))");
    let expected: Vec<_> = imports
        .iter()
        .map(|(_, why)| ("import_not_given", *why))
        .chain([("import_not_given", "whole interfaces")])
        .collect();
    check(&handler(&parts), &expected);
}

#[test]
fn a_flood_of_imports_is_summed_up() {
    let parts: String = (0..900).map(|i| format!("(import \"acme:x/y{i}\" (instance))")).collect();
    let problems = inspect_default(&handler(&parts)).expect_err("refused");
    assert_eq!(problems.len(), 21, "{problems:?}");
    assert!(problems[20].text.contains("880 more"), "{problems:?}");
}

#[test]
fn types_of_sockets_are_no_network_and_a_shared_c_library_may_name_all() {
    inspect_default(&handler(
        "(import \"wasi:sockets/tcp@0.2.0\" (instance)) (import \
        \"wasi:sockets/network@0.2.0\" (instance))",
    ))
    .expect("types only");
    let sockets = r#"(import "wasi:sockets/tcp-create-socket@0.2.0" (instance))"#;
    let libc = r#"(core module (global (export "libc.so:memory_base") i32 (i32.const 0)))"#;
    inspect_default(&handler(&format!("{sockets} {libc}"))).expect("a shared C library");
    check(&handler(sockets), &[("import_not_given", "no network")]);
}

#[test]
fn exports_are_named_as_they_are_and_as_they_should_be() {
    check(&wat("(component)"), &[("missing_export", "it exports nothing")]);
    check(
        &handler_of("wasi:cli/run@0.2.0", "run", ""),
        &[("missing_export", "a program with a `main`")],
    );
    check(
        &handler_of("oncebox:handler/incoming-handler@0.1.0", "hondle", ""),
        &[("wrong_export", "no function `handle`")],
    );
    check(
        &handler_of("oncebox:handler/incoming-handler@0.2.0", "handle", ""),
        &[("contract_version", "this host has 0.1")],
    );
    check(
        &handler("(import \"oncebox:handler/sql@0.3.0\" (instance))"),
        &[("contract_version", "`oncebox:handler/sql@0.3.0` is of another version")],
    );
    check(
        &handler("(import \"oncebox:handler/emit@0.1.0\" (instance))"),
        &[("contract_version", "this host has 0.1, and `emit`, `sql` and `trace` of 0.2")],
    );
    check(
        &handler("(import \"oncebox:handler/trace@0.1.0\" (instance))"),
        &[("contract_version", "`oncebox:handler/trace@0.1.0` is of another version")],
    );
    let later =
        inspect_default(&handler_of("oncebox:handler/incoming-handler@0.1.9", "handle", ""))
            .expect("a later patch");
    assert_eq!(later.report.contract, "0.1.9");
}

#[test]
fn all_problems_are_told_at_once() {
    let parts = r#"(import "wasi:http/types@0.2.0" (instance)) (import "oncebox:handler/context@0.1.0" (instance))
        (core module $m (memory 1000)) (core module $n (memory 3000)) (core instance (instantiate $m)) (core instance (instantiate $n))"#;
    check(
        &handler_of("oncebox:handler/incoming-batch-handler@0.1.0", "handle-batch", parts),
        &[
            ("import_not_given", "no network"),
            ("context_in_batch", "speaks of one message"),
            ("too_much_memory", "262144000 bytes"),
        ],
    );
    check(
        &wat(&format!("(component {parts})")),
        &[
            ("missing_export", "does not handle messages"),
            ("import_not_given", "no network"),
            ("too_much_memory", "may have 134217728"),
        ],
    );
}

#[test]
fn what_an_instance_takes_is_counted_per_instantiation() {
    let five = r#"(core module $m (memory 1) (table 3 funcref)) "#.to_owned()
        + &"(core instance (instantiate $m))".repeat(5);
    check(&handler(&five), &[("too_many_memories", "needs 5 linear memories and may have 4")]);
    check(
        &handler(
            "(core module $m (memory 1) (memory 1) (table 1 funcref) (table 1 funcref)) (core \
                instance (instantiate $m))",
        ),
        &[
            ("too_many_memories", "needs 2 linear memories in one module"),
            ("too_many_tables", "needs 2 tables in one module"),
        ],
    );
    let report = inspect_default(&handler("(core module (memory 1) (table 30000 funcref))"))
        .expect("it is not instantiated")
        .report;
    assert_eq!((report.memories, report.tables, report.core_instances), (0, 0, 1));
    check(
        &handler("(core module $m (table 30000 funcref)) (core instance (instantiate $m))"),
        &[("table_too_large", "needs 30000 elements")],
    );
    // Each level instantiates the one below twice: 2^12 core instances in a few hundred bytes.
    let mut bomb =
        "(component $c0 (core module $m (table 0 funcref)) (core instance (instantiate $m)))"
            .to_owned();
    for level in 1..=12 {
        let below = level - 1;
        bomb = format!(
            "(component $c{level} {bomb} (instance (instantiate $c{below})) (instance (instantiate \
                $c{below})))"
        );
    }
    let bomb = handler(&format!("{bomb} (instance (instantiate $c12))"));
    check(
        &bomb,
        &[
            ("too_many_tables", "needs 4096 tables"),
            ("too_many_core_instances", "needs 4097 core instances"),
        ],
    );
}

#[test]
fn the_report_says_what_it_is() {
    let report = inspect_default(&component(&guest(LOG, OK))).expect("sound").report;
    assert_eq!(
        (report.world.as_str(), report.contract.as_str(), report.memories),
        ("single", "0.1.0", 1)
    );
    assert_eq!(report.memory_bytes_min, 4 << 16);
    assert_eq!(report.permissions, ["oncebox:handler/log@0.1.0"]);
    assert!(report.imports.iter().any(|name| name == "oncebox:handler/types@0.1.0"), "{report:?}");
}

// What could go wrong: who deploys a component does not see that it sends messages.
#[test]
fn the_report_names_the_import_that_sends() {
    let core = guest(EMIT, &format!("{} {OK}", cancel("a")));
    let report = inspect_default(&component(&core)).expect("sound").report;
    assert_eq!((report.world.as_str(), report.contract.as_str()), ("single", "0.2.0"));
    assert_eq!(report.permissions, ["oncebox:handler/emit@0.2.0"]);
    assert!(report.imports.iter().any(|name| name == "oncebox:handler/emit@0.2.0"), "{report:?}");
}

// What could go wrong: a component with spans is taken for one of the version without them, or for
// one that sends messages.
#[test]
fn the_report_names_the_import_for_spans() {
    const TRACE: &str = r#"(import "oncebox:handler/trace@0.2.0" "[constructor]span" (func $span (param i32 i32) (result i32)))"#;
    let begin = "(drop (call $span (i32.const 0) (i32.const 0)))";
    let core = guest(TRACE, &format!("{begin} {OK}"));
    let report = inspect_default(&component(&core)).expect("sound").report;
    assert_eq!((report.world.as_str(), report.contract.as_str()), ("single", "0.2.0"));
    assert_eq!(report.permissions, ["oncebox:handler/trace@0.2.0"]);
}

/// Compares the proposals of inspection and engine. A proposal that only one of the two takes would
/// be refused late, or without reason.
#[test]
fn the_same_proposals_are_on_as_in_the_engine() {
    let engine = crate::engine::start(&config()).expect("an engine");
    for text in [
        "(func (param v128) (result v128) local.get 0)",
        "(memory 1) (memory 1)",
        "(memory i64 1)",
        "(memory 1 2 shared)",
        "(func $f return_call $f)",
        "(type (struct))",
        "(func (param externref))",
        "(func (param (ref null any)))",
        "(type $f (func)) (func (param (ref $f)) local.get 0 call_ref $f)",
        "(tag) (func throw 0)",
        "(table 1 exnref)",
        "(global i32 (i32.add (i32.const 1) (i32.const 2)))",
        "(memory 1 (pagesize 1))",
        "(func (param i64 i64) (result i64 i64) local.get 0 local.get 1 i64.mul_wide_s)",
        "(func (param v128 v128 v128) (result v128) local.get 0 local.get 1 local.get 2 \
            f32x4.relaxed_madd)",
        "(table i64 1 funcref)",
    ] {
        check_same(&engine, &wat(&format!("(component (core module {text}))")), text);
    }
    for text in [
        r#"(import "f" (func async))"#,
        "(type (stream u8))",
        "(type (future u8))",
        "(core func (canon task.cancel))",
        "(core func (canon context.get i32 0))",
        "(core func (canon thread.yield))",
        "(type (list u8 4))",
        "(type (map string u8))",
        "(type error-context)",
        "(core func (canon resource.drop 0))",
    ] {
        if let Ok(bytes) = wat::parse_str(format!("(component {text})")) {
            check_same(&engine, &bytes, text);
        }
    }
}

fn check_same(engine: &Engine, bytes: &[u8], text: &str) {
    let compiled =
        Component::from_binary(engine, bytes).map(|_| ()).map_err(|error| format!("{error:#}"));
    let compiled = compiled
        .or_else(|error| if error.contains("pooling allocator") { Ok(()) } else { Err(error) });
    let problems = inspect_default(bytes).expect_err("it is no handler");
    let is_valid = !problems.iter().any(|problem| problem.code == "invalid_wasm");
    assert_eq!(compiled.is_ok(), is_valid, "`{text}`: {compiled:?}, {problems:?}");
}

/// Inspects the example components, and those of other languages where they were built.
#[test]
fn real_components_are_taken_in_a_moment() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let languages = std::env::var_os("ONCEBOX_LANGUAGES")
        .map_or_else(|| root.join("target/languages"), Into::into);
    let mut seen = 0;
    for folder in [root.join("guest-examples/components"), languages] {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for path in entries
            .map(|entry| entry.expect("an entry").path())
            .filter(|path| path.extension().is_some_and(|it| it == "wasm"))
        {
            let bytes = fs::read(&path).expect("a component");
            let start = Instant::now();
            let inspected = inspect_default(&bytes)
                .unwrap_or_else(|problems| panic!("`{}`: {problems:#?}", path.display()));
            let report = &inspected.report;
            // All examples share a build of the SDK, and only these call `emit`.
            let emits = report.imports.iter().any(|import| is_emit(import));
            let name = path.file_stem().expect("a name").to_string_lossy();
            let sends = SENDING.iter().any(|example| name.ends_with(example));
            assert_eq!(emits, sends, "`{}`: {:?}", path.display(), report.imports);
            println!(
                "{}: {} KiB in {:.1} ms, {} imports, {} memories of {} KiB, {} tables of {}, {} \
                    core instances, {:?} {:?}",
                path.file_stem().expect("a name").display(),
                bytes.len() / 1024,
                start.elapsed().as_secs_f64() * 1e3,
                report.imports.len(),
                report.memories,
                report.memory_bytes_min / 1024,
                report.tables,
                report.table_elements_max,
                report.core_instances,
                report.languages,
                report.processed_by,
            );
            seen += 1;
        }
    }
    assert!(seen >= 10, "{seen} components");
}
