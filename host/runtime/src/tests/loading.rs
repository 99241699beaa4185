//! Errors of loading, and the cache of compiled code.

use std::{fs, path::PathBuf};

use oncebox_model::{policy::Limits, tx::Tx};
use wasmtime::Engine;

use super::{
    component, config, connection_to_nowhere,
    guests::{OK, guest},
    handle, message, runtime, settings,
};
use crate::{EncodeError, LoadError, RuntimeConfig, WasmRuntime, encode_component};

async fn refusal(bytes: &[u8]) -> String {
    match runtime().load(bytes).await {
        Err(error) => error.to_string(),
        Ok(_) => panic!("it was taken"),
    }
}

async fn check(text: &str, part: &str) {
    let refusal = refusal(&wat::parse_str(text).expect("WebAssembly text")).await;
    assert!(
        refusal.contains(part) && !refusal.contains('\n'),
        "`{refusal}` does not contain `{part}` in one line"
    );
}

#[tokio::test]
async fn what_is_no_component_is_refused_by_what_it_is() {
    assert!(refusal(b"").await.contains("not a WebAssembly file"));
    assert!(refusal(b"#!/bin/sh\necho hello").await.contains("not a WebAssembly file"));
    assert!(refusal(b"\0asm").await.contains("not a WebAssembly file"));
    assert!(refusal(b"\0asm\x0d\0\x01\0garbage").await.contains("cannot be compiled"));
    check("(module)", "oncebox component encode").await;
    let small =
        WasmRuntime::new(RuntimeConfig { component_bytes_max: 10, ..config() }).expect("an engine");
    let error = small.load(&component(&guest("", OK))).await.err().expect("too large");
    assert!(matches!(error, LoadError::TooLarge { max: 10, .. }), "{error}");
}

#[tokio::test]
async fn precompiled_code_is_refused() {
    let code = Engine::default().precompile_component(&component(&guest("", OK))).expect("code");
    assert!(refusal(&code).await.contains("precompiled"));
}

#[tokio::test]
async fn imports_beyond_the_contract_are_named() {
    check(
        r#"(component (import "wasi:http/outgoing-handler@0.2.0" (instance)) (import "acme:x/y" (instance)))"#,
        "`wasi:http/outgoing-handler@0.2.0`, `acme:x/y`",
    )
    .await;
    check(
        r#"(component (import "oncebox:handler/sql@0.3.0" (instance)))"#,
        "`oncebox:handler/sql@0.3.0`",
    )
    .await;
    check(r#"(component (import "oncebox:handler/secrets@0.1.0" (instance)))"#, "no network").await;
}

#[tokio::test]
async fn exports_are_checked() {
    check("(component)", "is missing; the component exports nothing").await;
    let wrong = r#"(component
        (core module $m (func (export "f")))
        (core instance $i (instantiate $m))
        (func $f (canon lift (core func $i "f")))
        (instance $e (export "handle" (func $f)))
        (export "oncebox:handler/incoming-handler@0.1.0" (instance $e)))"#;
    check(wrong, "differs from the host's").await;
}

#[tokio::test]
async fn an_import_of_another_type_is_told() {
    let wrong = r#"(component
        (import "oncebox:handler/log@0.1.0" (instance (export "log" (func (param "x" u32)))))
        (core module $m (func (export "f")))
        (core instance $i (instantiate $m))
        (func $f (canon lift (core func $i "f")))
        (instance $e (export "handle" (func $f)))
        (export "oncebox:handler/incoming-handler@0.1.0" (instance $e)))"#;
    check(wrong, "an import differs").await;
}

#[tokio::test]
async fn a_loaded_component_knows_itself() {
    let bytes = component(&guest(super::guests::LOG, OK));
    let loaded = runtime().load(&bytes).await.expect("sound");
    assert_eq!(loaded.size(), bytes.len());
    assert!(
        loaded.imports().iter().any(|import| import == "oncebox:handler/log@0.1.0"),
        "{:?}",
        loaded.imports()
    );
    assert!(
        !loaded.imports().iter().any(|import| import.contains("sql")),
        "it imports only what it uses"
    );
}

#[test]
fn only_core_modules_are_encoded() {
    assert!(matches!(encode_component(b"x"), Err(EncodeError::NotWasm)));
    assert!(matches!(
        encode_component(&component(&guest("", OK))),
        Err(EncodeError::AlreadyComponent)
    ));
    let empty = wat::parse_str("(module)").expect("text");
    let error = encode_component(&empty).expect_err("it exports nothing").to_string();
    assert!(error.contains("incoming-handler") && !error.contains('\n'), "{error}");
}

/// A cache folder of one test, which is removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("oncebox-cache-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn runtime(&self) -> WasmRuntime {
        WasmRuntime::new(RuntimeConfig { cache_dir: Some(self.0.clone()), ..config() })
            .expect("an engine")
    }

    fn files(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.0)
            .expect("a folder")
            .map(|entry| entry.expect("an entry").path())
            .collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn compiled_code_is_kept_and_used() {
    let folder = Folder::new("hit");
    let bytes = component(&guest("", OK));
    folder.runtime().load(&bytes).await.expect("sound");
    let [file] = &folder.files()[..] else { panic!("one file") };
    let written = fs::metadata(file).and_then(|metadata| metadata.modified()).expect("metadata");
    folder.runtime().load(&bytes).await.expect("sound");
    assert_eq!(
        fs::metadata(file).and_then(|metadata| metadata.modified()).expect("metadata"),
        written,
        "it was written again"
    );
}

#[tokio::test]
async fn damaged_code_is_never_executed_but_replaced() {
    let folder = Folder::new("damage");
    let bytes = component(&guest("", OK));
    folder.runtime().load(&bytes).await.expect("sound");
    let file = folder.files().remove(0);
    let sound = fs::read(&file).expect("code");
    let flipped: Vec<u8> = sound
        .iter()
        .enumerate()
        .map(|(at, byte)| if at == sound.len() / 2 { !byte } else { *byte })
        .collect();
    for damage in [&b""[..], b"oncebox1", &sound[..sound.len() - 1], &flipped] {
        fs::write(&file, damage).expect("a damaged file");
        folder.runtime().load(&bytes).await.expect("compiled again");
        assert_eq!(fs::read(&file).expect("code").len(), sound.len());
    }
}

#[tokio::test]
async fn a_cache_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("open");
    fs::create_dir_all(&folder.0).expect("a folder");
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o777)).expect("permissions");
    let error = WasmRuntime::new(RuntimeConfig { cache_dir: Some(folder.0.clone()), ..config() })
        .err()
        .expect("refused");
    assert!(error.to_string().contains("chmod 700"), "{error}");
}

#[tokio::test]
async fn little_virtual_memory_is_enough_when_asked_for() {
    let runtime = WasmRuntime::new(RuntimeConfig { small_virtual_memory: true, ..config() })
        .expect("an engine");
    let loaded = runtime.load(&component(&guest("", OK))).await.expect("sound");
    let settings = settings(Limits::default(), Vec::new());
    let tx = Tx::on(connection_to_nowhere().await);
    assert_eq!(handle(&runtime.handler(&loaded, settings), &tx, &message()).await, Ok(None));
}
