//! Report of a component without problems.

use serde::{Deserialize, Serialize};

use super::{scan::Scan, verdict::HandlerWorld};

/// Facts of a component: its permissions, its origin and the resources of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComponentReport {
    /// Bytes of the component.
    pub size: u64,
    /// World: `single` for one message at a time, `batch` for all messages of a transaction.
    pub world: String,
    /// Version of the contract that the component was built against.
    pub contract: String,
    /// Names of all imports.
    pub imports: Vec<String>,
    /// Names of the imports with functions. Imports that only name types are left out.
    pub permissions: Vec<String>,
    /// Programming languages, by the producers sections, which the host cannot verify.
    pub languages: Vec<Tool>,
    /// Compilers and later tools.
    pub processed_by: Vec<Tool>,
    /// Development kits.
    pub sdks: Vec<Tool>,
    /// Linear memories of an instance.
    pub memories: u64,
    /// Bytes of all memories at the start.
    pub memory_bytes_min: u64,
    /// Tables of an instance.
    pub tables: u64,
    /// Elements of the largest table at the start.
    pub table_elements_max: u64,
    /// Core instances of an instance.
    pub core_instances: u64,
    /// Sections without code, such as names and debug information.
    pub custom_sections: Vec<CustomSection>,
}

/// A tool with its version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    /// Name.
    pub name: String,
    /// Version; may be empty.
    pub version: String,
}

/// A custom section, summed over nested modules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CustomSection {
    /// Name.
    pub name: String,
    /// Bytes.
    pub size: u64,
}

pub(super) fn report(scan: &Scan, world: HandlerWorld, size: usize) -> ComponentReport {
    let resources = scan.resources;
    let mut imports: Vec<String> = scan.imports.iter().map(|import| import.name.clone()).collect();
    let mut permissions: Vec<String> = scan
        .imports
        .iter()
        .filter(|import| !import.functions.is_empty())
        .map(|import| import.name.clone())
        .collect();
    imports.sort();
    permissions.sort();
    let sections = scan.custom_sections.iter();
    ComponentReport {
        size: size as u64,
        world: if world.is_batch { "batch" } else { "single" }.to_owned(),
        contract: world.contract,
        imports,
        permissions,
        languages: tools(scan, "language"),
        processed_by: tools(scan, "processed-by"),
        sdks: tools(scan, "sdk"),
        memories: resources.memories,
        memory_bytes_min: resources.memory_bytes,
        tables: resources.tables,
        table_elements_max: resources.table_elements,
        core_instances: resources.core_instances,
        custom_sections: sections
            .map(|(name, size)| CustomSection { name: name.clone(), size: *size })
            .collect(),
    }
}

fn tools(scan: &Scan, field: &str) -> Vec<Tool> {
    let found = scan.producers.iter().filter(|((of, _), _)| of == field);
    found
        .map(|((_, name), version)| Tool { name: name.clone(), version: version.clone() })
        .collect()
}
