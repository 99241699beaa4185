//! Writes the SDK's bindings from `wit/`: `cargo run -p oncebox-guest-bindgen`.
//!
//! They are committed, so that the SDK can be copied into a project, and compiles without
//! the generator. A test here fails when they are not those of `wit/`.

use std::{error::Error, fs, path::PathBuf};

use wit_bindgen_core::{Files, WorldGenerator, wit_parser::Resolve};
use wit_bindgen_rust::{Opts, WithOption};

/// A world of the contract that the SDK has bindings of.
struct BoundWorld {
    name: &'static str,
    /// Its name with those of its package.
    id: &'static str,
    /// The folders of its package and of those before it that it needs.
    folders: &'static [&'static str],
    /// The file its bindings go to.
    file: &'static str,
}

/// The worlds in the order in which their bindings need each other.
const WORLDS: [BoundWorld; 5] = [
    BoundWorld {
        name: "handler",
        id: "oncebox:handler/handler@0.1.0",
        folders: &["wit"],
        file: "handler.rs",
    },
    BoundWorld {
        name: "batch-handler",
        id: "oncebox:handler/batch-handler@0.1.0",
        folders: &["wit"],
        file: "batch_handler.rs",
    },
    // The imports that version 0.2 of the contract adds to both. A component has them only where
    // its code calls them.
    BoundWorld {
        name: "enqueuer",
        id: "oncebox:handler/enqueuer@0.2.0",
        folders: &["wit", "wit/0.2"],
        file: "enqueuer.rs",
    },
    BoundWorld {
        name: "emitter",
        id: "oncebox:handler/emitter@0.2.0",
        folders: &["wit", "wit/0.2"],
        file: "emitter.rs",
    },
    BoundWorld {
        name: "tracer",
        id: "oncebox:handler/tracer@0.2.0",
        folders: &["wit", "wit/0.2"],
        file: "tracer.rs",
    },
];

/// What the world of batches shares with the first.
const SHARED: [&str; 4] = ["types", "sql", "log", "config"];

fn main() -> Result<(), Box<dyn Error>> {
    for world in &WORLDS {
        fs::write(bindings(world.file), generate(world)?)?;
        println!("wrote `guest/src/bindings/{}`", world.file);
    }
    Ok(())
}

fn bindings(file: &str) -> PathBuf {
    root().join("guest-examples/guest/src/bindings").join(file)
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn generate(world: &BoundWorld) -> Result<String, Box<dyn Error>> {
    let mut resolve = Resolve::default();
    let mut packages = Vec::new();
    for folder in world.folders {
        packages.push(resolve.push_path(root().join(folder))?.0);
    }
    let id = resolve.select_world(&packages, Some(world.id))?;
    let mut files = Files::default();
    let mut generator = options(world.name).build();
    generator.generate(&mut resolve, id, &mut files)?;
    let (_, source) = files.iter().next().ok_or("the generator wrote no file")?;
    Ok(String::from_utf8(source.to_vec())?)
}

fn options(world: &str) -> Opts {
    let name = world.replace('-', "_");
    let mut options = Opts {
        format: true,
        pub_export_macro: true,
        export_macro_name: Some(format!("__export_{name}")),
        default_bindings_module: Some(format!("::oncebox_guest::__private::{name}")),
        additional_derive_attributes: vec!["PartialEq".to_owned()],
        additional_derive_ignore: vec!["savepoint".to_owned(), "span".to_owned()],
        ..Opts::default()
    };
    match world {
        "batch-handler" => options.with = SHARED.map(shared).to_vec(),
        "enqueuer" => options.with = ["types", "sql"].map(shared).to_vec(),
        _ => {}
    }
    options
}

fn shared(interface: &str) -> (String, WithOption) {
    let path = format!("crate::bindings::handler::oncebox::handler::{interface}");
    let name = format!("oncebox:handler/{interface}@0.1.0");
    (name, WithOption::Path(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What could go wrong: the contract changes, and the SDK speaks the old one.
    #[test]
    fn the_committed_bindings_are_those_of_the_contract() {
        for world in &WORLDS {
            let file = world.file;
            let committed = fs::read_to_string(bindings(file)).expect("it is committed");
            let generated = generate(world).expect("wit/ is a package");
            assert!(
                committed == generated,
                "`{file}` is not what `wit/` says; run `cargo run -p oncebox-guest-bindgen`"
            );
        }
    }
}
