//! One pass over the binary, which validates it and reads its sections.
//!
//! The pass compiles nothing, and its recursion is bounded. The parser returns one section after
//! the other. The validator bounds the depth of types, and every count before it allocates for it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use wasmparser::{
    BinaryReader, BinaryReaderError, ComponentTypeRef, Encoding, FuncToValidate,
    FuncValidatorAllocations, FunctionBody, KnownCustom, Parser, Payload, ValidPayload, Validator,
    ValidatorResources, WasmFeatures,
    component_types::ComponentEntityType,
    types::{Types, TypesRef},
};

use super::resources::{Resources, Scopes};

/// Longest time for the check of function bodies. They take most of the time, and even small ones
/// may take for ever. The compiler checks the rest, in a process that the host can kill.
const BODIES_TIME: Duration = Duration::from_millis(400);
/// Instructions between two checks of the clock.
const INSTRUCTIONS: usize = 256;
/// Most targets of a `br_table` that is checked here. The check of each target takes time in
/// proportion to the results of its block.
const TARGETS_MAX: u32 = 10_000;
/// Deepest nesting of components.
const DEPTH_MAX: usize = 64;
/// Most types of a component and its modules together. Each takes some hundred bytes while it is
/// read.
const TYPES_MAX: u64 = 1_000_000;
/// Most types of components and instances in one section. The parser recurses into nested ones, and
/// their number bounds the depth. Real components have one for each interface.
const NESTED_TYPES_MAX: usize = 500;
/// Most tools that are kept of the producers sections, and most names of custom sections.
const TOOLS_MAX: usize = 64;
/// Most bytes that are kept of the name or version of a tool, or of a section's name.
const NAME_BYTES_MAX: usize = 100;

/// The result of a pass.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) imports: Vec<ComponentImport>,
    pub(super) exports: Vec<ComponentExport>,
    pub(super) resources: Resources,
    /// Whether a C library is linked into the component as a shared library.
    pub(super) has_shared_libc: bool,
    /// Versions of the tools in the producers sections, by field and tool.
    pub(super) producers: BTreeMap<(String, String), String>,
    /// Bytes of custom sections by name, summed over nested modules.
    pub(super) custom_sections: BTreeMap<String, u64>,
}

/// An import of the component itself.
#[derive(Debug, Clone)]
pub(super) struct ComponentImport {
    pub(super) name: String,
    pub(super) is_interface: bool,
    /// Names of the functions, and of the methods of resources.
    pub(super) functions: Vec<String>,
}

/// An export of the component itself.
#[derive(Debug, Clone)]
pub(super) struct ComponentExport {
    pub(super) name: String,
    /// Names of the functions; none for an export that is no interface.
    pub(super) functions: Option<Vec<String>>,
}

/// An error of the binary: it is not valid WebAssembly, or beyond a bound.
#[derive(Debug)]
pub(super) struct Invalid {
    pub(super) message: String,
    pub(super) offset: usize,
}

impl From<BinaryReaderError> for Invalid {
    fn from(error: BinaryReaderError) -> Self {
        Self { message: error.message().to_owned(), offset: error.offset() }
    }
}

/// Returns the proposals that the engine has switched on. A test compares the two.
pub(super) fn features() -> WasmFeatures {
    WasmFeatures::WASM3
        .difference(WasmFeatures::GC_TYPES | WasmFeatures::EXCEPTIONS | WasmFeatures::THREADS)
        .union(WasmFeatures::COMPONENT_MODEL)
}

/// Validates and reads a component or a core module.
pub(super) fn scan(bytes: &[u8]) -> Result<Scan, Invalid> {
    scan_with(bytes, true)
}

fn scan_with(bytes: &[u8], has_world: bool) -> Result<Scan, Invalid> {
    let mut reading = ScanState { has_world, ..ScanState::default() };
    let mut bodies = Bodies::new();
    let mut validator = Validator::new_with_features(features());
    let mut parser = Parser::new(0);
    parser.set_features(features());
    for payload in parser.parse_all(bytes) {
        let payload = payload?;
        reading.check_bounds(bytes, &payload)?;
        match validator.payload(&payload)? {
            ValidPayload::Func(function, body) => bodies.check(function, &body)?,
            ValidPayload::End(types) => reading.types = Some(types),
            ValidPayload::Ok | ValidPayload::Parser(_) => {}
        }
        reading.payload(payload)?;
    }
    reading.finish()
}

/// The state of a pass.
#[derive(Default)]
struct ScanState {
    scan: Scan,
    scopes: Scopes,
    /// Resources of the core module that is being read.
    module: Option<Resources>,
    types_defined: u64,
    /// Whether a custom section of a core module may hold its world, which is scanned too.
    has_world: bool,
    types: Option<Types>,
}

impl ScanState {
    /// Refuses a section that would cost the validator too much time, stack or memory.
    fn check_bounds(&mut self, bytes: &[u8], payload: &Payload<'_>) -> Result<(), Invalid> {
        let too_much = |message: String, offset: usize| Err(Invalid { message, offset });
        let (count, range) = match payload {
            Payload::Version { encoding: Encoding::Component, range, .. }
                if self.scopes.depth() >= DEPTH_MAX =>
            {
                return too_much(
                    format!("components nest more than {DEPTH_MAX} deep"),
                    range.start,
                );
            }
            Payload::TypeSection(types) => (types.count(), types.range()),
            Payload::CoreTypeSection(types) => (types.count(), types.range()),
            Payload::ComponentTypeSection(types) => (types.count(), types.range()),
            _ => return Ok(()),
        };
        self.types_defined = self.types_defined.saturating_add(u64::from(count));
        if self.types_defined > TYPES_MAX {
            return too_much(format!("it defines more than {TYPES_MAX} types"), range.start);
        }
        let nested = bytes
            .get(range.clone())
            .unwrap_or_default()
            .windows(2)
            .filter(|pair| matches!(pair, [1, 0x41 | 0x42]))
            .count();
        if nested > NESTED_TYPES_MAX {
            return too_much(
                format!("a type holds more than {NESTED_TYPES_MAX} types of interfaces"),
                range.start,
            );
        }
        Ok(())
    }

    /// Reads one valid section.
    fn payload<'a>(&mut self, payload: Payload<'a>) -> Result<(), Invalid> {
        match payload {
            Payload::Version { encoding: Encoding::Component, .. } => self.scopes.enter(),
            Payload::Version { encoding: Encoding::Module, .. } => {
                self.module = Some(Resources::default())
            }
            Payload::MemorySection(memories) => {
                self.in_module(memories, |resources, memory| resources.add_memory(&memory))?
            }
            Payload::TableSection(tables) => {
                self.in_module(tables, |resources, table| resources.add_table(&table.ty))?
            }
            Payload::ExportSection(exports) => {
                each(exports, |it| self.scan.has_shared_libc |= it.name.starts_with("libc.so:"))?
            }
            Payload::InstanceSection(instances) => {
                each(instances, |it| self.scopes.instantiate_module(&it))?
            }
            Payload::ComponentInstanceSection(instances) => {
                each(instances, |it| self.scopes.instantiate_component(&it))?
            }
            Payload::ComponentAliasSection(aliases) => each(aliases, |it| self.scopes.alias(&it))?,
            Payload::ComponentImportSection(imports) => each(imports, |it| self.import(&it))?,
            Payload::ComponentExportSection(exports) => each(exports, |it| self.export(&it))?,
            Payload::CustomSection(section) => self.custom(&section)?,
            Payload::End(_) => self.end(),
            _ => {}
        }
        Ok(())
    }

    fn in_module<'a, T: wasmparser::FromReader<'a>>(
        &mut self,
        section: wasmparser::SectionLimited<'a, T>,
        add: impl Fn(&mut Resources, T),
    ) -> Result<(), Invalid> {
        let resources = self.module.get_or_insert_default();
        each(section, |item| add(resources, item))
    }

    fn import(&mut self, import: &wasmparser::ComponentImport<'_>) {
        match import.ty {
            ComponentTypeRef::Module(_) => self.scopes.import_module(),
            ComponentTypeRef::Component(_) => self.scopes.import_component(),
            _ => {}
        }
        if self.scopes.depth() == 1 {
            let is_interface = matches!(import.ty, ComponentTypeRef::Instance(_));
            self.scan.imports.push(ComponentImport {
                name: import.name.name.to_owned(),
                is_interface,
                functions: Vec::new(),
            });
        }
    }

    fn export(&mut self, export: &wasmparser::ComponentExport<'_>) {
        self.scopes.export(export);
        if self.scopes.depth() == 1 {
            self.scan
                .exports
                .push(ComponentExport { name: export.name.name.to_owned(), functions: None });
        }
    }

    fn end(&mut self) {
        match self.module.take() {
            Some(resources) => self.scopes.define_module(resources),
            None => self.scan.resources = self.scopes.leave(),
        }
    }

    fn custom(&mut self, section: &wasmparser::CustomSectionReader<'_>) -> Result<(), Invalid> {
        if self.has_world
            && self.module.is_some()
            && self.scopes.depth() == 0
            && section.name().starts_with("component-type")
        {
            // The encoder reads the world of a core module from the component in this section.
            let inside = |invalid: Invalid| Invalid {
                offset: invalid.offset.saturating_add(section.data_offset()),
                ..invalid
            };
            scan_with(section.data(), false).map_err(inside)?;
        }
        let name = short(section.name());
        if self.scan.custom_sections.len() < TOOLS_MAX
            || self.scan.custom_sections.contains_key(&name)
        {
            *self.scan.custom_sections.entry(name).or_default() += section.data().len() as u64;
        }
        if let KnownCustom::Producers(fields) = section.as_known() {
            self.producers(fields);
        }
        Ok(())
    }

    /// Reads a producers section as far as possible. The rest is ignored, since it does not concern
    /// the code.
    fn producers(&mut self, fields: wasmparser::ProducersSectionReader<'_>) {
        for field in fields.into_iter().map_while(Result::ok) {
            for tool in field.values.into_iter().map_while(Result::ok) {
                if self.scan.producers.len() < TOOLS_MAX {
                    self.scan
                        .producers
                        .insert((field.name.to_owned(), short(tool.name)), short(tool.version));
                }
            }
        }
    }

    /// Adds the names of functions, from the types, which are complete only at the end.
    fn finish(mut self) -> Result<Scan, Invalid> {
        let types = self
            .types
            .as_ref()
            .ok_or_else(|| Invalid { message: "it has no end".to_owned(), offset: 0 })?
            .as_ref();
        for import in &mut self.scan.imports {
            import.functions =
                functions(types, types.component_item_for_import(&import.name)).unwrap_or_default();
        }
        for export in &mut self.scan.exports {
            export.functions = functions(types, types.component_item_for_export(&export.name));
        }
        Ok(self.scan)
    }
}

fn each<'a, T: wasmparser::FromReader<'a>>(
    section: wasmparser::SectionLimited<'a, T>,
    mut visit: impl FnMut(T),
) -> Result<(), Invalid> {
    for item in section {
        visit(item?);
    }
    Ok(())
}

fn functions(
    types: TypesRef<'_>,
    item: Option<&wasmparser::component_types::ComponentItem>,
) -> Option<Vec<String>> {
    let ComponentEntityType::Instance(instance) = item?.ty else { return None };
    let exports = types[instance].exports.iter();
    Some(
        exports
            .filter(|(_, item)| matches!(item.ty, ComponentEntityType::Func(_)))
            .map(|(name, _)| name.clone())
            .collect(),
    )
}

fn short(text: &str) -> String {
    crate::text::printable(&crate::text::bounded(text, NAME_BYTES_MAX))
}

/// The checker of function bodies, within a deadline.
struct Bodies {
    deadline: Instant,
    allocations: FuncValidatorAllocations,
    is_over: bool,
}

impl Bodies {
    fn new() -> Self {
        Self {
            deadline: Instant::now() + BODIES_TIME,
            allocations: FuncValidatorAllocations::default(),
            is_over: false,
        }
    }

    fn check(
        &mut self,
        function: FuncToValidate<ValidatorResources>,
        body: &FunctionBody<'_>,
    ) -> Result<(), Invalid> {
        if self.is_over {
            return Ok(());
        }
        let mut validator = function.into_validator(std::mem::take(&mut self.allocations));
        let mut reader = body.get_binary_reader();
        validator.read_locals(&mut reader)?;
        reader.set_features(features());
        let mut count = 0;
        while !reader.eof() {
            if (count % INSTRUCTIONS == 0 && Instant::now() > self.deadline)
                || has_many_targets(reader.clone())
            {
                self.is_over = true;
                return Ok(());
            }
            count += 1;
            reader.visit_operator(&mut validator.visitor(reader.original_position()))??;
        }
        reader.finish_expression(&validator.visitor(reader.original_position()))?;
        self.allocations = validator.into_allocations();
        Ok(())
    }
}

/// Returns whether the next instruction is a `br_table` that takes long to check.
fn has_many_targets(mut reader: BinaryReader<'_>) -> bool {
    const BR_TABLE: u8 = 0x0e;
    matches!(reader.read_u8(), Ok(BR_TABLE))
        && reader.read_var_u32().is_ok_and(|targets| targets > TARGETS_MAX)
}
