//! Parser of Protobuf schemas.
//!
//! The parser drops everything that JSON does not need before it links the files: options,
//! extensions, services, reserved names. An import that only serves options may therefore be
//! missing, and a hostile option has no effect.

use std::collections::BTreeMap;

use prost_reflect::DescriptorPool;
use prost_reflect::prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumOptions, FileDescriptorProto, MessageOptions,
};

use super::ProtobufSchema;

/// Folder of the types that come with Protobuf.
const WELL_KNOWN: &str = "google/protobuf/";
/// Most bytes of a full name, package and outer messages included. Each field holds its full name.
const NAME_BYTES_MAX: usize = 512;
/// Most messages, fields, enums and enum values of a schema and its imports together.
const ENTRIES_MAX: usize = 20_000;

impl ProtobufSchema {
    /// Parses a schema with its imports, which are references or well-known files.
    pub(crate) fn parse(text: &str, references: &[(String, String)]) -> Result<Self, String> {
        let mut files = ProtoFiles::default();
        for (name, text) in references.iter().filter(|(name, _)| !is_well_known(name)) {
            files
                .add(name, text)
                .map_err(|why| format!("in `{name}`, which it refers to: {why}"))?;
        }
        let mut own = "schema.proto".to_owned();
        while files.by_name.contains_key(&own) {
            own.insert(0, '_');
        }
        files.add(&own, text)?;
        let mut pool = DescriptorPool::new();
        pool.add_file_descriptor_protos(files.linked()?).map_err(|error| error.to_string())?;
        let file = pool.get_file_by_name(&own).ok_or("it is not there")?;
        Ok(Self { file })
    }
}

fn is_well_known(name: &str) -> bool {
    name.starts_with(WELL_KNOWN) && DescriptorPool::global().get_file_by_name(name).is_some()
}

/// The files of a schema, by name.
#[derive(Default)]
struct ProtoFiles {
    by_name: BTreeMap<String, FileDescriptorProto>,
    entries: usize,
}

impl ProtoFiles {
    fn add(&mut self, name: &str, text: &str) -> Result<(), String> {
        let parsed = protox_parse::parse(name, text);
        let mut file = parsed.map_err(|error| error.to_string())?;
        // The JSON of well-known types depends on their original definitions.
        if file.package() == "google.protobuf" || file.package().starts_with("google.protobuf.") {
            return Err("the package `google.protobuf` is not for others".to_owned());
        }
        let package = file.package().to_owned();
        self.reduce(&mut file, &package)?;
        self.by_name.insert(name.to_owned(), file);
        Ok(())
    }

    fn reduce(&mut self, file: &mut FileDescriptorProto, package: &str) -> Result<(), String> {
        file.options = None;
        file.source_code_info = None;
        file.extension.clear();
        file.service.clear();
        check_name(package, "")?;
        file.message_type
            .iter_mut()
            .try_for_each(|message| self.reduce_message(message, package))?;
        file.enum_type.iter_mut().try_for_each(|kind| self.reduce_enum(kind, package))
    }

    /// Drops what JSON does not need from a message. The recursion is bounded: the parser takes no
    /// nesting beyond 31.
    fn reduce_message(
        &mut self,
        message: &mut DescriptorProto,
        around: &str,
    ) -> Result<(), String> {
        let is_entry = message.options.as_ref().is_some_and(MessageOptions::map_entry);
        message.options =
            is_entry.then(|| MessageOptions { map_entry: Some(true), ..MessageOptions::default() });
        message.extension.clear();
        message.extension_range.clear();
        message.reserved_range.clear();
        message.reserved_name.clear();
        let name = check_name(around, message.name())?;
        self.count(1 + message.field.len())?;
        for field in &mut message.field {
            field.options = None;
            check_name(&name, field.name())?;
            check_name("", field.json_name())?;
        }
        for oneof in &mut message.oneof_decl {
            oneof.options = None;
            check_name(&name, oneof.name())?;
        }
        message
            .nested_type
            .iter_mut()
            .try_for_each(|message| self.reduce_message(message, &name))?;
        message.enum_type.iter_mut().try_for_each(|kind| self.reduce_enum(kind, &name))
    }

    fn reduce_enum(&mut self, kind: &mut EnumDescriptorProto, around: &str) -> Result<(), String> {
        // The registry has checked aliases when the schema was registered.
        kind.options = Some(EnumOptions { allow_alias: Some(true), ..EnumOptions::default() });
        kind.reserved_range.clear();
        kind.reserved_name.clear();
        let name = check_name(around, kind.name())?;
        self.count(1 + kind.value.len())?;
        for value in &mut kind.value {
            value.options = None;
            check_name(&name, value.name())?;
        }
        Ok(())
    }

    fn count(&mut self, more: usize) -> Result<(), String> {
        self.entries += more;
        if self.entries > ENTRIES_MAX {
            return Err(format!(
                "it has more than {ENTRIES_MAX} messages, fields and values, with what it imports"
            ));
        }
        Ok(())
    }

    /// Sorts the files so that each stands behind its imports, and drops imports that are missing.
    /// Linking fails where a type of a missing import is used.
    fn linked(mut self) -> Result<Vec<FileDescriptorProto>, String> {
        let well_known = DescriptorPool::global();
        let mut imported: Vec<String> =
            self.by_name.values().flat_map(|file| file.dependency.clone()).collect();
        while let Some(name) = imported.pop() {
            if let Some(file) =
                well_known.get_file_by_name(&name).filter(|_| !self.by_name.contains_key(&name))
            {
                let file = file.file_descriptor_proto().clone();
                imported.extend(file.dependency.clone());
                self.by_name.insert(name, file);
            }
        }
        let names: Vec<String> = self.by_name.keys().cloned().collect();
        for file in self.by_name.values_mut() {
            keep_imports(file, &names);
        }
        let mut sorted = Vec::new();
        while !self.by_name.is_empty() {
            let is_ready = |file: &FileDescriptorProto| {
                file.dependency.iter().all(|name| !self.by_name.contains_key(name))
            };
            let ready =
                self.by_name.iter().find(|(_, file)| is_ready(file)).map(|(name, _)| name.clone());
            let ready = ready.ok_or("its imports lead back to themselves")?;
            sorted.extend(self.by_name.remove(&ready));
        }
        Ok(sorted)
    }
}

fn keep_imports(file: &mut FileDescriptorProto, names: &[String]) {
    let all = std::mem::take(&mut file.dependency);
    let public = std::mem::take(&mut file.public_dependency);
    file.weak_dependency.clear();
    for (at, import) in all.into_iter().enumerate() {
        if !names.contains(&import) || file.dependency.contains(&import) {
            continue;
        }
        if public.iter().any(|public| usize::try_from(*public) == Ok(at)) {
            file.public_dependency.extend(i32::try_from(file.dependency.len()));
        }
        file.dependency.push(import);
    }
}

fn check_name(around: &str, name: &str) -> Result<String, String> {
    let full = if around.is_empty() { name.to_owned() } else { format!("{around}.{name}") };
    if full.len() > NAME_BYTES_MAX {
        Err(format!("it has a name of more than {NAME_BYTES_MAX} bytes"))
    } else {
        Ok(full)
    }
}
