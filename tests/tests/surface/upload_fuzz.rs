//! Damaged and hostile uploads never crash or hang a host. What could go wrong: a panic, a stack
//! that overflows, a count that is believed, a compilation without end, a refusal that says
//! nothing.
//!
//! `ONCEBOX_FUZZ_INPUTS` says how many random inputs are made, `ONCEBOX_FUZZ_SEED` repeats a run.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use oncebox_runtime::{Compiler, Problem, RuntimeConfig, WasmRuntime, inspect};
use oncebox_tests::host::program;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

const LEDGER: &[u8] = include_bytes!("../../../guest-examples/components/ledger.wasm");
/// Longest look at an input, on a machine that does other things as well.
const INSPECT_MAX: Duration = Duration::from_secs(30);
/// Longest compilation; the process is stopped after that.
const COMPILE_MAX: Duration = Duration::from_secs(15);

fn runtime(compile_max: Duration) -> WasmRuntime {
    let compiler = Compiler {
        program: program().unwrap(),
        memory_bytes_max: 2 << 30,
        duration_max: compile_max,
    };
    WasmRuntime::new(RuntimeConfig {
        instances_max: 1,
        compiler: Some(compiler),
        ..RuntimeConfig::default()
    })
    .unwrap()
}

/// What became of an input: the code of its first problem, or `taken`.
async fn upload(runtime: &WasmRuntime, what: &str, bytes: Vec<u8>) -> String {
    let start = Instant::now();
    let allowance = runtime.allowance();
    // On a thread as the host uses it, with the stack that it has there.
    let inspected = tokio::task::spawn_blocking(move || inspect(&bytes, &allowance))
        .await
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    let took = start.elapsed();
    assert!(took < INSPECT_MAX, "{what}: a look took {took:?}");
    let inspected = match inspected {
        Ok(inspected) => inspected,
        Err(problems) => return told(what, &problems),
    };
    let start = Instant::now();
    let loaded = runtime.load(&inspected.component).await;
    assert!(
        start.elapsed() < COMPILE_MAX + Duration::from_secs(10),
        "{what}: compiling took {:?}",
        start.elapsed()
    );
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            return told(
                what,
                &[error.problem().unwrap_or_else(|| panic!("{what}: the host failed: {error}"))],
            );
        }
    };
    match runtime.probe(&loaded).await {
        Ok(()) => "taken".to_owned(),
        Err(problem) => told(what, &[problem]),
    }
}

fn told(what: &str, problems: &[Problem]) -> String {
    assert!(!problems.is_empty(), "{what}: refused without a reason");
    for problem in problems {
        let Problem { code, text } = problem;
        assert!(!code.is_empty() && text.len() > 20 && text.len() < 8_000, "{what}: {problem:?}");
        assert!(!text.contains(['\n', '\0', '\u{1b}']), "{what}: {problem:?}");
    }
    problems[0].code.clone()
}

// Random damage
// --------------------------------------------------------------------------------------

/// The examples, and the largest core module in each.
fn seeds() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples/components");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let components: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|it| it == "wasm"))
        .map(|path| fs::read(path).unwrap())
        .collect();
    let module = |component: &Vec<u8>| {
        let modules = sections(component).into_iter().filter(|section| section.id == 1);
        modules
            .max_by_key(|section| section.end - section.content)
            .map(|section| component[section.content..section.end].to_vec())
    };
    let modules: Vec<_> = components.iter().filter_map(module).collect();
    assert!(components.len() >= 10 && modules.len() == components.len());
    components.into_iter().chain(modules).collect()
}

#[derive(Debug, Clone, Copy)]
struct Section {
    id: u8,
    start: usize,
    content: usize,
    end: usize,
}

/// The outermost sections of a binary, as far as they can be read.
fn sections(bytes: &[u8]) -> Vec<Section> {
    let (mut at, mut found) = (8, Vec::new());
    while at < bytes.len() {
        let Some((size, content)) = leb(bytes, at + 1) else { break };
        let end = content.saturating_add(size);
        if end > bytes.len() {
            break;
        }
        found.push(Section { id: bytes[at], start: at, content, end });
        at = end;
    }
    found
}

fn leb(bytes: &[u8], mut at: usize) -> Option<(usize, usize)> {
    let (mut value, mut shift) = (0usize, 0);
    loop {
        let byte = *bytes.get(at)?;
        value |= usize::from(byte & 0x7f) << shift;
        (at, shift) = (at + 1, shift + 7);
        if byte < 0x80 {
            return Some((value, at));
        }
        if shift > 28 {
            return None;
        }
    }
}

fn unsigned(mut value: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn section(id: u8, content: &[u8]) -> Vec<u8> {
    [&[id][..], &unsigned(content.len()), content].concat()
}

fn mutate(rng: &mut StdRng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds.choose(rng).unwrap().clone();
    for _ in 0..rng.random_range(1..4) {
        damage(rng, &mut bytes, seeds);
    }
    bytes
}

fn damage(rng: &mut StdRng, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
    if bytes.len() < 16 {
        return;
    }
    // Half of the time near the beginning, where what decides stands.
    let reach = if rng.random() { bytes.len() } else { bytes.len().min(2_000) };
    let at = rng.random_range(0..reach);
    match rng.random_range(0..9) {
        0 => bytes[at] ^= 1 << rng.random_range(0..8),
        1 => bytes[at] = rng.random(),
        2 => bytes.truncate(at),
        3 => drop(bytes.splice(
            at..at,
            (0..rng.random_range(1..20)).map(|_| rng.random::<u8>()).collect::<Vec<_>>(),
        )),
        4 => drop(bytes.splice(at..(at + 5).min(bytes.len()), *b"\xff\xff\xff\xff\x0f")),
        5 => {
            let other = seeds.choose(rng).unwrap();
            let from = rng.random_range(0..other.len());
            let to = (from + rng.random_range(1..4_000)).min(other.len());
            drop(bytes.splice(at..at, other[from..to].iter().copied()));
        }
        6 => drop(bytes.drain(at..(at + rng.random_range(1..200)).min(bytes.len()))),
        kind => rearrange(rng, bytes, kind == 7),
    }
}

/// Lengths of sections are changed, or sections doubled, dropped or swapped.
fn rearrange(rng: &mut StdRng, bytes: &mut Vec<u8>, lengths: bool) {
    let found = sections(bytes);
    let (Some(one), Some(other)) = (found.choose(rng).copied(), found.choose(rng).copied()) else {
        return;
    };
    let content = bytes[other.start..other.end].to_vec();
    match rng.random_range(0..3) {
        _ if lengths => {
            let size = (one.end - one.content)
                .saturating_add_signed(rng.random_range(-300i32..300) as isize);
            drop(bytes.splice(one.start + 1..one.content, unsigned(size)));
        }
        0 => drop(bytes.splice(one.start..one.start, content)),
        1 => drop(bytes.drain(one.start..one.end)),
        _ => drop(bytes.splice(one.start..one.end, content)),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_uploads_are_refused_in_words() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let inputs = number("ONCEBOX_FUZZ_INPUTS").unwrap_or(300);
    let seed: u64 = number("ONCEBOX_FUZZ_SEED").unwrap_or_else(rand::random);
    println!("ONCEBOX_FUZZ_SEED={seed}, {inputs} inputs");
    let (mut rng, seeds, runtime) = (StdRng::seed_from_u64(seed), seeds(), runtime(COMPILE_MAX));
    let mut outcomes = BTreeMap::<String, u32>::new();
    for count in 0..inputs {
        let input = mutate(&mut rng, &seeds);
        *outcomes
            .entry(upload(&runtime, &format!("input {count} of seed {seed}"), input).await)
            .or_default() += 1;
    }
    println!("{outcomes:?}");
    // Some reach the compiler, and some do not.
    for outcome in ["invalid_wasm", "taken"] {
        assert!(outcomes.contains_key(outcome), "no input was {outcome}: {outcomes:?}");
    }
}

// Hostile by design
// ----------------------------------------------------------------------------------

const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";
const MODULE: &[u8] = b"\0asm\x01\0\0\0";

/// A handler that brings another core module, which nobody instantiates but which is compiled.
fn with_module(module: &[u8]) -> Vec<u8> {
    [LEDGER, &section(1, module)].concat()
}

/// A core module whose functions, of type `() -> ()`, have these bodies.
fn functions(count: usize, body: &[u8]) -> Vec<u8> {
    let types = section(1, b"\x01\x60\0\0");
    let functions = section(3, &[unsigned(count), vec![0; count]].concat());
    let entry = [unsigned(body.len()), body.to_vec()].concat();
    [MODULE, &types, &functions, &section(10, &[unsigned(count), entry.repeat(count)].concat())]
        .concat()
}

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

async fn check(runtime: &WasmRuntime, what: &str, bytes: Vec<u8>, expected: &[&str]) {
    let (size, start) = (bytes.len(), Instant::now());
    let outcome = upload(runtime, what, bytes).await;
    println!("{what}: {} KiB, {outcome} after {:.2} s", size / 1024, start.elapsed().as_secs_f64());
    assert!(expected.contains(&outcome.as_str()), "{what}: {outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nests_or_claims_without_bound_is_refused() {
    let runtime = runtime(COMPILE_MAX);
    let nested = |levels: usize| {
        (0..levels).fold(COMPONENT.to_vec(), |inner, _| [COMPONENT, &section(4, &inner)].concat())
    };
    for levels in [60, 5_000] {
        check(
            &runtime,
            "components in components",
            nested(levels),
            &["missing_export", "invalid_wasm"],
        )
        .await;
    }
    for (what, open) in [("component types", 0x41), ("instance types", 0x42)] {
        for levels in [90, 490, 100_000] {
            let inner = [[open, 1, 1].repeat(levels), vec![open, 0]].concat();
            let bytes = [COMPONENT, &section(7, &[vec![1], inner].concat())].concat();
            check(&runtime, what, bytes, &["missing_export", "invalid_wasm"]).await;
        }
    }
    // Where the encoder of core modules would read them.
    let inner = [[0x41, 1, 1].repeat(100_000), vec![0x41, 0]].concat();
    let types = [COMPONENT, &section(7, &[vec![1], inner].concat())].concat();
    let world = section(0, &[&b"\x0ecomponent-type"[..], &types].concat());
    check(
        &runtime,
        "types in the world of a core module",
        [MODULE, &world].concat(),
        &["invalid_wasm"],
    )
    .await;
    // Each type is the one before it twice: the last has 2^1000 parts.
    let doubled: Vec<u8> =
        (0..1_000).flat_map(|i| [vec![0x6f, 2], signed(i), signed(i)].concat()).collect();
    let bytes =
        [COMPONENT, &section(7, &[unsigned(1_001), vec![0x70, 0x7d], doubled].concat())].concat();
    check(&runtime, "a tuple of tuples", bytes, &["invalid_wasm"]).await;
    let lists: Vec<u8> = (0..200_000).flat_map(|i| [vec![0x70], signed(i)].concat()).collect();
    let bytes =
        [COMPONENT, &section(7, &[unsigned(200_001), vec![0x70, 0x7d], lists].concat())].concat();
    check(&runtime, "a list of lists", bytes, &["invalid_wasm", "missing_export"]).await;
    for id in [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13] {
        let claim = [MODULE, &section(id, b"\xff\xff\xff\xff\x0f")].concat();
        check(&runtime, "a core section that claims four billion", claim, &["invalid_wasm"]).await;
        let claim = [COMPONENT, &section(id, b"\xff\xff\xff\xff\x0f")].concat();
        check(&runtime, "a section that claims four billion", claim, &["invalid_wasm"]).await;
    }
    check(
        &runtime,
        "four billion segments",
        [MODULE, &section(12, b"\xff\xff\xff\xff\x0f")].concat(),
        &["invalid_wasm"],
    )
    .await;
    check(
        &runtime,
        "a name of four billion bytes",
        [COMPONENT, b"\0\x06\xff\xff\xff\xff\x0fa"].concat(),
        &["invalid_wasm", "missing_export"],
    )
    .await;
    check(
        &runtime,
        "a memory of all addresses",
        with_module(&wat("(module (memory 65536))")),
        &["cannot_be_compiled"],
    )
    .await;
}

/// Indices of types are signed numbers.
fn signed(mut value: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x40 {
        bytes.push(value as u8 & 0x7f | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_keeps_a_compiler_busy_is_stopped() {
    let runtime = runtime(Duration::from_secs(4));
    let any = [
        "taken",
        "invalid_wasm",
        "cannot_be_compiled",
        "compiling_takes_too_long",
        "compiling_takes_too_much_memory",
    ];
    check(&runtime, "a million functions", with_module(&functions(1_000_000, b"\0\x0b")), &any)
        .await;
    // A group of 50,000 locals each.
    let locals = functions(2_000, b"\x01\xd0\x86\x03\x7e\x0b");
    check(&runtime, "fifty thousand locals in each function", with_module(&locals), &any).await;
    let blocks = [vec![0], [2, 0x40].repeat(100_000), vec![0x0b; 100_001]].concat();
    check(&runtime, "blocks in blocks", with_module(&functions(1, &blocks)), &any).await;
    let results = "i32 ".repeat(900);
    let bomb = format!(
        "(module (type $t (func (result {results}))) (func (param i32) (result {results}) \
         (block $b (type $t) (unreachable) (br_table {} (local.get 0)))))",
        "$b ".repeat(300_000)
    );
    check(&runtime, "a table of branches with 900 values each", with_module(&wat(&bomb)), &any)
        .await;
    let calls = format!(
        "(module (type $t (func (param {results}) (result {results}))) (func $f (type $t) \
            (unreachable) {}))",
        "(call $f) ".repeat(200_000)
    );
    check(&runtime, "calls with 900 parameters", with_module(&wat(&calls)), &any).await;
    let adds = "(local.set 0 (i64.mul (i64.add (local.get 0) (local.get 1)) (local.get 0)))"
        .repeat(500_000);
    check(
        &runtime,
        "one function of megabytes",
        with_module(&wat(&format!("(module (func (param i64 i64) {adds}))"))),
        &any,
    )
    .await;
}
