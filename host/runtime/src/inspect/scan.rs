//! One pass over the binary: whether it is valid, and what its sections say.
//!
//! Nothing is compiled and nothing recurses without bound: the parser hands over one section after
//! the other, and the validator bounds the depth of types and every count before it allocates for
//! it.

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

use super::needs::{Needs, Scopes};

/// How long function bodies are looked at. Reading them takes longest, and some that are small take
/// for ever; what is left after that the compiler checks, in a process that can be stopped.
const BODIES_TIME: Duration = Duration::from_millis(400);
/// Instructions between two looks at the clock.
const INSTRUCTIONS: usize = 256;
/// Targets of a `br_table` that are checked here: each of them costs as much as its block has
/// results.
const TARGETS_MAX: u32 = 10_000;
/// Components inside components.
const DEPTH_MAX: usize = 64;
/// Types of a component and its modules together; each takes some hundred bytes while it is read.
const TYPES_MAX: u64 = 1_000_000;
/// Types of components and instances in one section. The parser recurses where one is inside
/// another, and no more can be inside one another than there are. Real ones have one for each
/// interface.
const NESTED_TYPES_MAX: usize = 500;
/// Different tools that are kept of the producers sections.
const TOOLS_MAX: usize = 64;
/// Bytes that are kept of the name or version of a tool or of a section.
const NAME_BYTES_MAX: usize = 100;

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) imports: Vec<Import>,
    pub(super) exports: Vec<Export>,
    pub(super) needs: Needs,
    /// A C library is linked into it as a shared library.
    pub(super) has_shared_libc: bool,
    /// By field of the producers sections: tools with their versions.
    pub(super) producers: BTreeMap<(String, String), String>,
    /// Bytes by name, over all nested modules.
    pub(super) custom_sections: BTreeMap<String, u64>,
}

/// An import of the component itself.
#[derive(Debug, Clone)]
pub(super) struct Import {
    pub(super) name: String,
    pub(super) is_interface: bool,
    /// Names of its functions and of the methods of its resources.
    pub(super) functions: Vec<String>,
}

/// An export of the component itself.
#[derive(Debug, Clone)]
pub(super) struct Export {
    pub(super) name: String,
    /// Names of the functions, where it is an interface.
    pub(super) functions: Option<Vec<String>>,
}

/// Not what a WebAssembly binary may be.
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

/// The proposals that the engine has switched on; a test compares.
pub(super) fn features() -> WasmFeatures {
    WasmFeatures::WASM3
        .difference(WasmFeatures::GC_TYPES | WasmFeatures::EXCEPTIONS | WasmFeatures::THREADS)
        .union(WasmFeatures::COMPONENT_MODEL)
}

/// Read a component or a core module.
pub(super) fn scan(bytes: &[u8]) -> Result<Scan, Invalid> {
    scan_with(bytes, true)
}

fn scan_with(bytes: &[u8], has_world: bool) -> Result<Scan, Invalid> {
    let mut reading = Reading { has_world, ..Reading::default() };
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

#[derive(Default)]
struct Reading {
    scan: Scan,
    scopes: Scopes,
    /// The core module that is being read.
    module: Option<Needs>,
    types_defined: u64,
    /// A core module may say in a section of its own what it is.
    has_world: bool,
    types: Option<Types>,
}

impl Reading {
    /// What the validator would take its time, its stack or its memory for.
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

    /// Look at one section that was found valid.
    fn payload<'a>(&mut self, payload: Payload<'a>) -> Result<(), Invalid> {
        match payload {
            Payload::Version { encoding: Encoding::Component, .. } => self.scopes.enter(),
            Payload::Version { encoding: Encoding::Module, .. } => {
                self.module = Some(Needs::default())
            }
            Payload::MemorySection(memories) => {
                self.in_module(memories, |needs, memory| needs.add_memory(&memory))?
            }
            Payload::TableSection(tables) => {
                self.in_module(tables, |needs, table| needs.add_table(&table.ty))?
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
        add: impl Fn(&mut Needs, T),
    ) -> Result<(), Invalid> {
        let needs = self.module.get_or_insert_default();
        each(section, |item| add(needs, item))
    }

    fn import(&mut self, import: &wasmparser::ComponentImport<'_>) {
        match import.ty {
            ComponentTypeRef::Module(_) => self.scopes.import_module(),
            ComponentTypeRef::Component(_) => self.scopes.import_component(),
            _ => {}
        }
        if self.scopes.depth() == 1 {
            let is_interface = matches!(import.ty, ComponentTypeRef::Instance(_));
            self.scan.imports.push(Import {
                name: import.name.name.to_owned(),
                is_interface,
                functions: Vec::new(),
            });
        }
    }

    fn export(&mut self, export: &wasmparser::ComponentExport<'_>) {
        self.scopes.export(export);
        if self.scopes.depth() == 1 {
            self.scan.exports.push(Export { name: export.name.name.to_owned(), functions: None });
        }
    }

    fn end(&mut self) {
        match self.module.take() {
            Some(needs) => self.scopes.define_module(needs),
            None => self.scan.needs = self.scopes.leave(),
        }
    }

    fn custom(&mut self, section: &wasmparser::CustomSectionReader<'_>) -> Result<(), Invalid> {
        if self.has_world
            && self.module.is_some()
            && self.scopes.depth() == 0
            && section.name().starts_with("component-type")
        {
            // The encoder reads the world of a core module from a component in here.
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

    /// What cannot be read of a producers section is left out: it says nothing about the code.
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

    /// Names of functions come from the types, which are complete only at the end.
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
    mut see: impl FnMut(T),
) -> Result<(), Invalid> {
    for item in section {
        see(item?);
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

/// Checks function bodies, as many as there is time for.
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

/// Whether the next instruction is a `br_table` that would take long to check.
fn has_many_targets(mut reader: BinaryReader<'_>) -> bool {
    const BR_TABLE: u8 = 0x0e;
    matches!(reader.read_u8(), Ok(BR_TABLE))
        && reader.read_var_u32().is_ok_and(|targets| targets > TARGETS_MAX)
}
